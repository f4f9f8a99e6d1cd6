if [ $# -lt 2 ]; then
  echo "usage: sbatch $(basename "$0") CONFIG.toml RUN [options of fedmpi train]" >&2
  exit 2
fi
config=$1 run=$2
shift 2
@run_folder@
words=(train "$config" --out "$run" "$@")
words=("${words[@]//%a/${SLURM_ARRAY_TASK_ID:-%a}}" --resume)

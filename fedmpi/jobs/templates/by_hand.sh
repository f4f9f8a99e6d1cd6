# The environment: FEDMPI_ENVIRONMENT, a file of lines to be run first (module load ..., conda activate ...); then
# FEDMPI_VENV, a virtual environment, by default .venv in the folder that the job was submitted from, where there is one.
if [ -n "${FEDMPI_ENVIRONMENT:-}" ]; then
  # shellcheck source=/dev/null
  source "$FEDMPI_ENVIRONMENT" || { echo "FEDMPI_ENVIRONMENT=$FEDMPI_ENVIRONMENT failed" >&2; exit 1; }
fi
set -u
bin=${FEDMPI_VENV:-${SLURM_SUBMIT_DIR:-.}/.venv}/bin
if [ -n "${FEDMPI_COMMAND:-}" ]; then
  read -ra fedmpi <<< "$FEDMPI_COMMAND"
elif [ -x "$bin/fedmpi" ]; then
  fedmpi=("$bin/fedmpi")
else
  fedmpi=(fedmpi)
fi

# The launcher: srun, told by SLURM_MPI_TYPE which MPI it starts, or another one.
export SLURM_MPI_TYPE=${SLURM_MPI_TYPE:-pmi2} SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
read -ra launch <<< "${FEDMPI_LAUNCH:-srun --kill-on-bad-exit=1}"
if [ "${launch[0]}" = mpiexec ] && [ -x "$bin/mpiexec" ]; then
  launch[0]=$bin/mpiexec
fi

# Each task of an array has a folder of its own: %a is its number, and without one it stands behind the folder's name.
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  case "$run" in *%a*) ;; *) run=$run/%a ;; esac
fi

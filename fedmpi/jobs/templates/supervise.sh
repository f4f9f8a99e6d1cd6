
# The batch shell alone receives the warning before the time limit, and SIGTERM when SLURM ends the job. It passes both on: the
# ranks finish their round, save and leave with 75. What SLURM tells of the job says whether it is to be queued again.
warned='' term='' stop='' settled='' signalled='' job=''
listen() {
  trap 'signalled=yes warned=yes' USR1
  trap 'signalled=yes term=yes' TERM
  trap 'signalled=yes stop=yes' INT
}
# The folder of the run, the rounds recorded there, and how often the job may be queued again without one more.
for ((word = 0; word < ${#words[@]}; word++)); do
  case "${words[word]}" in --out) run=${words[word + 1]} ;; esac
done
run=${run_of_sweep:-$run}
rounds() { if [ -r "$run/metrics.jsonl" ]; then grep -c '' "$run/metrics.jsonl"; else echo 0; fi; }
most=5
in_vain() {
  local times=0
  if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -r "$run/restarts" ]; then read -r times < "$run/restarts"; fi
  times=$((times + 1))
  [ "$(rounds)" -le "$before" ] || times=0
  mkdir -p "$run" && echo "$times" > "$run/restarts"
  [ "$times" -gt "$most" ]
}
fact() { sed -n "s/^\(.* \)\?$1=\([^ ]*\).*/\2/p" <<< "$facts"; }
# What becomes of the job: SLURM queues it again by itself, or it was cancelled, or it has to be asked for.
settle() {
  trap '' USR1 TERM INT # also for scontrol: SLURM sends its signals to all processes of the job
  facts=$(scontrol show job --oneliner "$SLURM_JOB_ID" 2> /dev/null | head -n 1)
  local state restarts reason preempted
  state=$(fact JobState) restarts=$(fact Restarts) reason=$(fact Reason) preempted=$(fact PreemptTime)
  if [ "$state" = RUNNING ] && [ "${1:-}" = early ]; then
    : # nobody ends the job: the run decides
  elif [ "${restarts:-0}" -gt "${SLURM_RESTART_COUNT:-0}" ]; then
    echo "SLURM queues the job again"
    settled=yes
  elif [ "$state" = RUNNING ] || [ "$state" = TIMEOUT ] || [ "$state" = PREEMPTED ] || [ "$reason" = TimeLimit ] ||
    [ "${preempted:-None}" != None ]; then
    settled=yes
    if [ "${preempted:-None}" = None ] && in_vain; then
      echo "no round was finished in this start and the $most before it, and the job is not queued again: give it more --time, or" \
        "warn it later (--signal=B:USR1@SECONDS)"
    else
      echo "asking for the job to be queued again"
      scontrol requeue "$SLURM_JOB_ID"
    fi
  else
    echo "the job was cancelled and stays so: submit it again to continue"
    settled=yes
  fi
  listen
}
listen
before=$(rounds)

# What an earlier start of this job that was killed has left: the lock of the run's folder, and MPICH's shared memory on the nodes.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  rm -f "$run/.lock"
  srun --ntasks-per-node=1 --ntasks="${SLURM_NNODES:-1}" \
    find /dev/shm -maxdepth 1 -user "$(id -un)" -name 'mpich_*' -mmin +1 -delete 2> /dev/null
fi

# What continues the run that the folder holds also starts one where it holds none: the same line serves both. Ranks that do
# not find one another in MPI's start end with 76 and leave a mark: they are started again at once, three times.
export FEDMPI_NOT_STARTED=$run/not-started
for start in first second third last; do
  rm -f "$FEDMPI_NOT_STARTED"
  "${launch[@]}" "${fedmpi[@]}" "${words[@]}" &
  job=$!
  while :; do
    if [ -n "$signalled" ]; then
      signalled=''
      kill -USR1 "$job" 2> /dev/null
      [ -z "$term" ] || [ -n "$settled" ] || settle early
    fi
    wait "$job"
    code=$?
    [ -n "$signalled" ] || break
  done
  [ ! -e "$FEDMPI_NOT_STARTED" ] || code=76
  [ "$code" -eq 76 ] && [ -z "$warned$term$stop" ] && [ "$start" != last ] || break
  echo "MPI did not start: the ranks are started again"
done
rm -f "$FEDMPI_NOT_STARTED"

# 0 is done, 1 an error, 2 wrong input, 75 saved, 76 not started; after the warning also that of ranks killed while they left.
if [ "$code" -eq 75 ] && [ -n "$stop" ]; then
  echo "saved, and stopped as asked: submit it again to continue"
elif [ "$code" -eq 75 ] || { [ -n "$warned" ] && [ "$code" -gt 2 ]; }; then
  [ -n "$settled" ] || settle
fi
exit "$code"

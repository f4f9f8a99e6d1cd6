
# The batch shell alone receives the warning before the time limit, and SIGTERM when SLURM ends the job. It passes both on: the
# ranks finish their round, save and leave with 75. What SLURM tells of the job says whether it is to be queued again.
warned='' term='' stop='' settled='' signalled='' job=''
listen() {
  trap 'signalled=yes warned=yes' USR1
  trap 'signalled=yes term=yes' TERM
  trap 'signalled=yes stop=yes' INT
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
    echo "asking for the job to be queued again"
    scontrol requeue "$SLURM_JOB_ID"
    settled=yes
  else
    echo "the job was cancelled and stays so: submit it again to continue"
    settled=yes
  fi
  listen
}
listen

# --resume continues the run that the folder holds and starts one where it holds none: the same line serves both.
"${launch[@]}" "${fedmpi[@]}" "${words[@]}" --resume &
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

# 0 is done, 1 an error, 2 wrong input, 75 saved; after the warning also that of ranks killed while they left.
if [ "$code" -eq 75 ] && [ -n "$stop" ]; then
  echo "saved, and stopped as asked: submit it again to continue"
elif [ "$code" -eq 75 ] || { [ -n "$warned" ] && [ "$code" -gt 2 ]; }; then
  [ -n "$settled" ] || settle
fi
exit "$code"

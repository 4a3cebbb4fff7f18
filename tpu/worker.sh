#!/usr/bin/env bash
# A run on one worker of a slice: started detached, watched and stopped by tpu/queued.py over ssh.
#
#   worker.sh launch RUN -- COMMAND...   start COMMAND unless RUN is running
#   worker.sh status RUN                 one line: iha-worker HOST IDLE|RUNNING|EXITED CODE|LOST
#   worker.sh stop RUN [SECONDS]         SIGTERM (train.py saves), SIGKILL after SECONDS (default 120)
#   worker.sh log RUN [LINES]            the end of its output
#
# TPU_GENERATION names the flags of tpu/env.sh to run under. Files are in ~/.iha_jax/runs/RUN.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  sed -n '4,7s/^# *//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

# The supervisor below holds the lock as long as the command runs, so a recycled process id can't mislead.
running() {
  ! flock -n "$state/lock" true
}

say() {
  printf 'iha-worker %s %s\n' "$(hostname)" "$*"
}

status() {
  if running; then
    say RUNNING
  elif [ -f "$state/exit" ]; then
    say EXITED "$(cat "$state/exit")"
  elif [ -f "$state/pid" ]; then
    say LOST
  else
    say IDLE
  fi
}

# Whether the process id on file is of this boot of the machine.
known() {
  [ -f "$state/pid" ] && [ "$(cat "$state/boot")" = "$(cat /proc/sys/kernel/random/boot_id)" ]
}

kill_all() {
  if known; then
    kill -KILL -- "-$(cat "$state/pid")" 2>/dev/null || true
  fi
}

launch() {
  local wanted
  wanted=$(printf '%q ' "$@")
  exec 9>"$state/lock"
  if ! flock -n 9; then
    if [ "$(cat "$state/command")" != "$wanted" ]; then
      echo "run $run is running another command here: $(cat "$state/command")" >&2
      exit 3
    fi
    say RUNNING
    return
  fi
  # Children that outlived their parent would still hold the chips.
  kill_all
  printf '%s\n' "$wanted" >"$state/command"
  rm -f "$state/exit"
  cat /proc/sys/kernel/random/boot_id >"$state/boot"
  cd "$root"
  # shellcheck source=tpu/env.sh
  . "$root/tpu/env.sh" "${TPU_GENERATION:-}"
  setsid bash "$root/tpu/worker.sh" supervise "$run" -- "$@" >>"$state/log" 2>&1 </dev/null &
  echo "$!" >"$state/pid"
  say RUNNING
}

# Inherits the lock as descriptor 9, and lends it to no one.
supervise() {
  local code=0
  trap : TERM INT HUP
  printf '%s: %s\n' "$(date -u +%FT%TZ)" "$(printf '%q ' "$@")"
  "$@" 9>&- || code=$?
  printf '%s: exit status %s\n' "$(date -u +%FT%TZ)" "$code"
  echo "$code" >"$state/exit.new"
  mv "$state/exit.new" "$state/exit"
}

stop() {
  local seconds=${1:-120} waited=0
  # The command alone: its own children are its own business.
  if known; then
    pkill -TERM -P "$(cat "$state/pid")" || true
  fi
  while running && [ "$waited" -lt "$((seconds * 10))" ]; do
    sleep 0.1
    waited=$((waited + 1))
  done
  kill_all
  status
}

[ $# -ge 2 ] || usage
verb=$1 run=$2
shift 2
state=$HOME/.iha_jax/runs/$run
mkdir -p "$state"
case $verb in
  launch | supervise)
    if [ "${1:-}" != -- ] || [ $# -lt 2 ]; then usage; fi
    shift
    "$verb" "$@"
    ;;
  status) status ;;
  stop) stop "$@" ;;
  log) tail -n "${1:-50}" "$state/log" 2>/dev/null || true ;;
  *) usage ;;
esac

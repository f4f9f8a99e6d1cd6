#!/bin/bash
# All measurements that want a GPU, in one go, as tables to paste into docs/performance.md.
#
#   benchmarks/gpu.sh                        on cuda; takes one GPU, and one process each but for fedmpi's second row
#   benchmarks/gpu.sh --device cpu --quick   the same code on a processor with tiny sizes: only that the script works
#   benchmarks/gpu.sh --peer pfl=/opt/pfl/bin/python --out tables.md --folder /scratch/shards
#
# Measured: the device itself with the built-in models as runs (rooflines), models one by one and side by side (engines),
# the workloads W1 W2 W3 S4 S6, and where the time of fedmpi's rounds goes. pfl takes part where it is installed, here or
# by --peer. The tables are printed and kept in --out (gpu-tables.md). A part that fails is named at the end (exit
# code 1), the others are measured all the same; without the device nothing is (exit code 2).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python} device=cuda out=gpu-tables.md quick=() folder=() peers=() failed=()

refuse() {
  echo "error: $1" >&2
  exit 2
}

while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=(--quick); shift; continue ;;
    --device | --out | --folder | --peer) [ $# -ge 2 ] || refuse "$1 needs a value" ;;
    *) refuse "$1 is no option: $0 [--device NAME] [--quick] [--out FILE] [--folder FOLDER] [--peer NAME=PYTHON]…" ;;
  esac
  case "$1" in
    --device) device=$2 ;;
    --out) out=$2 ;;
    --folder) folder=(--folder "$2") ;;
    --peer) peers+=(--peer "$2") ;;
  esac
  shift 2
done
[ "$device" != cpu ] || [ ${#quick[@]} -gt 0 ] || refuse "--device cpu only tries this script: add --quick"
"$python" -c 'import torch' 2> /dev/null || refuse "$python has no torch: name the environment's by PYTHON=…"
described=$("$python" -m benchmarks.devices "$device") || exit 2

say() {
  printf '%s\n' "$@" | tee -a "$out"
}

measure() { # measure TITLE MODULE [ARGUMENTS…]: a section of the tables
  local title=$1
  shift
  say "" "## $title" ""
  "$python" -m "$@" --device "$device" "${quick[@]}" | tee -a "$out" || failed+=("$title")
}

export OMP_NUM_THREADS=1
printf '' > "$out" || exit 2
say "$described" "$(date -u +%Y-%m-%d), commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown), without CUDA graphs"
[ ${#quick[@]} -eq 0 ] || say "Tiny sizes: these figures say nothing."
few=()
[ ${#quick[@]} -eq 0 ] || few=(mlp text-cnn GRUClassifier)
measure "Built-in models as runs, and what the device allows" benchmarks.rooflines "${peers[@]}"
measure "Model by model, side by side or one by one" benchmarks.engines "${few[@]}"
measure "Workloads" benchmarks "${folder[@]}" "${peers[@]}"
measure "Where the time of a round goes" benchmarks --profile "${folder[@]}"
if [ ${#failed[@]} -gt 0 ]; then
  say "" "Failed: $(printf '%s; ' "${failed[@]}")"
  exit 1
fi

#!/usr/bin/env bash
# All measurements on a machine with a GPU, from the repository's root; each part has a time limit of its own.
#   BUDGET=400 PARTS="exact rounds presets ranks waits repeats tf32 products grouped" OUT=out bash benchmarks/gpu/run.sh
#   DEVICE=cpu QUICK=1 OUT=out bash benchmarks/gpu/run.sh      tries the script without a GPU
# WHEELS may name a folder of wheels for a machine without a network; PYTHON and MPIEXEC the programs to use.
set -u
device=${DEVICE:-cuda} quick=${QUICK:+--quick} python=${PYTHON:-python3} budget=${BUDGET:-400}
parts=${PARTS:-engines exact order rounds presets ranks waits repeats tf32 products grouped}
out=${OUT:-gpu-out} wheels=${WHEELS:-} work=$(mktemp -d) began=$SECONDS
export KINETO_LOG_LEVEL=5 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONPATH=$work/site:$PWD
mkdir -p "$out"

if [ -n "$wheels" ]; then
    # pip --target leaves the libraries of the mpich wheel out, so this wheel is unpacked by hand
    find "$wheels" -name '*.whl' ! -name 'mpich-*' -print0 |
        xargs -0 "$python" -m pip install -q --no-index --no-deps --no-compile --target "$work/site"
    for wheel in "$wheels"/mpich-*.whl; do
        "$python" -m zipfile -e "$wheel" "$work/wheel" && mv "$work"/wheel/*.data/data "$work/mpich" &&
            chmod +x "$work"/mpich/bin/* && export MPIEXEC="$work/mpich/bin/mpiexec" MPI4PY_LIBMPI="$work/mpich/lib/libmpi.so.12"
        export LD_LIBRARY_PATH="$work/mpich/lib:$work/mpich/lib/mpich:${LD_LIBRARY_PATH:-}"
    done
fi

part() { # part NAME SECONDS COMMAND...: not longer than the rest of the budget; what was printed is kept
    local name=$1 most=$2 rest=$((budget - (SECONDS - began)))
    shift 2
    [[ " $parts " == *" $name "* ]] || return 0
    [ "$most" -lt "$rest" ] || most=$rest
    [ "$most" -gt 5 ] || { echo "== $name: no time left"; return 0; }
    timeout -k 5 "$most" "$@" 2>&1 | grep -v --line-buffered "^USDT" | tee "$out/$name.txt"
    echo "== $name: exit code ${PIPESTATUS[0]}, $((SECONDS - began)) s in all"
}
check() { part "$1" "$2" "$python" -m benchmarks.gpu.correctness "$1" --device "$device" --budget "$(($2 - 8))" $quick; }
ranks() { # exact runs on 1 and 2 ranks: the same bits
    local keys="--set preset=fedavg --set rounds=3 --set server.exact=true --set cluster.device=$device" n
    for n in 1 2; do
        "${MPIEXEC:-mpiexec}" -n $n "$python" -m fedmpi train $keys --out "$work/exact-$n" >"$work/$n.log" 2>&1 || tail -3 "$work/$n.log"
    done
    cmp "$work"/exact-{1,2}/model.safetensors && echo "ok   ranks: 1 and 2 ranks are bit-identical"
}
export -f ranks
export work python device

{
    date -u
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null
    "$python" -c "import torch; print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version())"
    "$python" -m fedmpi doctor
} 2>&1 | tee "$out/environment.txt"
check engines 55
check exact 45
check order 40
part rounds 110 "$python" -m benchmarks.gpu.rounds --device "$device" --budget 95 $quick
check presets 60
part ranks 60 bash -c ranks
part waits 60 "$python" -m benchmarks.gpu.waits --device "$device" --budget 30 $quick
check repeats 40
part tf32 40 "$python" -m benchmarks.gpu.rounds W2 resnet18 transformer --device "$device" --budget 30 --tf32 $quick
for form in products:1e12 grouped:0; do
    part ${form%:*} 20 "$python" -m benchmarks.gpu.rounds W2 cifar-cnn --device "$device" --budget 15 --patch-bytes ${form#*:} $quick
done
echo "== $((SECONDS - began)) s; failed checks:"
grep -h '^FAIL' "$out"/*.txt
rm -rf "$work"

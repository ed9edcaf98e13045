#!/usr/bin/env bash
# Everything that is measured on one card, with its output kept under benchmarks/results/.
#
#   DEVICE=cuda benchmarks/gpu.sh [--pymarl3 PATH] [--original PATH]
#   DEVICE=cpu SMALL=1 benchmarks/gpu.sh        (a dry run without a card, in a few minutes)
#
# Variables: DEVICE (cuda or cpu), PYTHON, OUT (folder of the output), SMALL=1 (small batches and few repetitions).
# A step that fails is noted, and the next one begins; the exit code is the number of failed steps.
set -u
case ${1:-} in -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.." || exit

DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-python}
OUT=${OUT:-benchmarks/results}
SMALL=${SMALL:-0}
pymarl3="" original="" failed=0
while [ $# -gt 0 ]; do
    case "$1" in
        --pymarl3) pymarl3=$2; shift 2 ;;
        --original) original=$2; shift 2 ;;
        *) echo "error: $1 is not known; see the head of $0" >&2; exit 2 ;;
    esac
done
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$OUT"
log="$OUT/gpu_${DEVICE}_$(date +%Y%m%d_%H%M%S).txt"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say() { printf '\n## %s\n' "$*" | tee -a "$log"; }

# step TITLE COMMAND...: run a command with a limit, keep what it says.
step() {
    say "$1"
    shift
    printf '$ %s\n' "$*" >>"$log"
    local code=0
    timeout "${LIMIT:-900}" "$@" >"$scratch/out" 2>"$scratch/err" || code=$?
    if [ "$code" = 0 ]; then
        [ "${QUIET:-0}" = 1 ] || tee -a "$log" <"$scratch/out"
    else
        failed=$((failed + 1))
        { echo "FAILED with exit code $code"; tail -n 15 "$scratch/out" "$scratch/err"; } | tee -a "$log"
    fi
}

# takes SCRIPT OPTION: whether a benchmark knows an option.
takes() { "$PYTHON" "benchmarks/$1" --help 2>/dev/null | grep -q -- "$2"; }

# row SCRIPT PEER ARGUMENTS...: time one row of the table, beside the peer where its path is given.
row() {
    local script=$1 peer=$2
    shift 2
    [ -f "benchmarks/$script" ] || { say "$script: not there"; return; }
    local given=("$@")
    if takes "$script" --device; then
        given+=(--device "$DEVICE")
    elif [ "$DEVICE" != cpu ]; then
        say "$script: knows no --device, so the processor is what it times"
    fi
    [ -n "$peer" ] && given+=(--peer "$peer")
    step "$script ${given[*]}" "$PYTHON" "benchmarks/$script" "${given[@]}"
}

# train TITLE WORDS...: a short run; prints speed, memory and phases of its last record.
train() {
    local title=$1
    shift
    local words=("env_args.map_name=$map" "t_max=$steps" "test_interval=1000000" "log_interval=$((steps / 4))"
        "learner_log_interval=$((steps / 4))" "log_memory_usage=True" "save_model=False"
        "local_results_path=$scratch/runs" "unique_token=run" "use_cuda=$use_cuda")
    rm -rf "$scratch/runs"
    QUIET=1 step "$title" "$PYTHON" src/main.py --config=qmix --env-config=skirmish -u with "${words[@]}" "$@"
    "$PYTHON" - "$scratch/runs/run/metrics.jsonl" <<'PY' | tee -a "$log"
import json, sys
try:
    rows = [json.loads(line) for line in open(sys.argv[1])]
except OSError:
    sys.exit("no record")
keep = ("steps_per_second", "updates_per_second", "communicate_ms_per_sync")
last = {k: v for k, v in rows[-1].items() if k in keep or k.startswith(("time/", "memory/", "gpu/"))}
print(json.dumps({k: round(v, 4) for k, v in last.items()}))
PY
}

if [ "$DEVICE" = cpu ]; then use_cuda=False; else use_cuda=True; fi
if [ "$SMALL" = 1 ]; then
    batch=8 updates=2 steps=4000 map=3m
else
    batch=128 updates=20 steps=60000 map=5m_vs_6m
fi

say "the machine"
{ uname -srm; command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader; } | tee -a "$log"
step "versions" "$PYTHON" -c "import torch; print('torch', torch.__version__, 'cuda', torch.version.cuda, torch.cuda.is_available())"

say "QMIX update and the three stages, beside PyMARL3 and the original"
row qmix_update.py "$pymarl3" --batch "$batch" --updates "$updates"
row stage1_update.py "$original" --batch "$batch"
row stage2_update.py "$original" --batch "$batch"
row stage3_update.py "$original" --batch "$batch"
row acting.py ""

say "battles, rollouts and training in the card's memory: environment steps per second"
if [ "$DEVICE" = cpu ]; then
    say "resident.py: not run (it needs a card)"
else
    for many in 1024 4096 16384; do
        step "resident.py, $many battles at once" "$PYTHON" benchmarks/resident.py --device "$DEVICE" --map "$map" --slots "$many"
    done
    for config in gnn_qmix omagd_small; do
        step "resident.py, $config" "$PYTHON" benchmarks/resident.py --device "$DEVICE" --map "$map" --slots 4096 --config "$config"
    done
    step "resident.py, SMAX" "$PYTHON" benchmarks/resident.py --device "$DEVICE" --env smax --map 3m --slots 4096
fi

say "QMIX updates at the lengths of real play: packed, and fixed shapes as CUDA graphs, beside PyMARL3"
for small in 3m 5m_vs_6m; do
    row qmix_update.py "$pymarl3" --map "$small" --lengths play --batch "$batch" --updates "$updates"
    row qmix_update.py "$pymarl3" --map "$small" --lengths play --batch "$batch" --updates "$updates" --precision bf16
done

say "whole runs: float32, bf16, replay on the card, compiled"
train "float32"
train "bf16" precision=bf16 acting_precision=bf16
[ "$DEVICE" = cpu ] || train "replay on the card" buffer_cpu_only=False
[ "$DEVICE" = cpu ] || train "everything on the card, packed updates" runner=resident buffer_cpu_only=False \
    graph_updates=False batch_size_run=1024 "t_max=$((steps * 100))" "log_interval=$((steps * 25))" \
    "learner_log_interval=$((steps * 25))"
[ "$DEVICE" = cpu ] || train "everything on the card, updates as graphs" runner=resident buffer_cpu_only=False batch_size_run=1024 \
    "t_max=$((steps * 100))" "log_interval=$((steps * 25))" "learner_log_interval=$((steps * 25))"
train "acting on the processor" cpu_inference=True
[ "$SMALL" = 1 ] || train "compiled" compile=True

say "ranks: one by NCCL, two on one card by gloo"
[ "$DEVICE" = cpu ] || train "NCCL, one rank" run=ddp world_size=1 dist_backend=nccl
[ "$DEVICE" = cpu ] || step "NCCL, a group of one" "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node=1 \
    src/main.py --config=qmix -u with run=ddp dist_backend=nccl "env_args.map_name=$map" "t_max=$((steps / 4))" \
    test_interval=1000000 "local_results_path=$scratch/nccl"
train "gloo, two ranks" run=ddp world_size=2 dist_backend=gloo

say "$failed step(s) failed; kept in $log"
exit "$failed"

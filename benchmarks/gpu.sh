#!/usr/bin/env bash
# Measures one GPU, every row of the table in benchmarks/README.md, in at most 5 minutes; keeps JSON lines.
#
#   benchmarks/gpu.sh [--pymarl3 PATH] [--epymarl PATH]
#   DEVICE=cpu SMALL=1 benchmarks/gpu.sh        (a dry run without a card)
#
# Variables: DEVICE (cuda or cpu), PYTHON, OUT (file of the lines: benchmarks/results/gpu.jsonl), SMALL=1 (small sizes).
# A row that fails or for which no time is left says so, and the next one begins; the exit code is the number of them.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

DEVICE=${DEVICE:-cuda}
OUT=${OUT:-benchmarks/results/gpu.jsonl}
SMALL=${SMALL:-0}
pymarl3=() epymarl=() failed=0 seconds=295
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --pymarl3) [ $# -ge 2 ] || fail "$1 needs a path"; pymarl3=(--peer "$2"); shift 2 ;;
        --epymarl) [ $# -ge 2 ] || fail "$1 needs a path"; epymarl=(--peer "$2"); shift 2 ;;
        *) fail "$1: not understood; see $0 --help" ;;
    esac
done
use_python
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$(dirname -- "$OUT")"

# row LIMIT COMMAND...: run a command for at most LIMIT seconds; keep its JSON lines with the card's name.
row() {
    local limit=$1 began=$SECONDS code=0
    shift
    [ $((seconds - SECONDS)) -ge "$limit" ] || limit=$((seconds - SECONDS))
    if [ "$limit" -ge 5 ]; then
        timeout -k 2 "$limit" "$@" >"$scratch/out" 2>"$scratch/err" || code=$?
    else
        code="no time was left"
        : >"$scratch/out"
    fi
    [ "$code" = 0 ] || failed=$((failed + 1))
    "$venv_python" - "$scratch/out" "$code" $((SECONDS - began)) "$*" <<'PY' | tee -a "$OUT"
import json, sys, torch
lines = [line for line in open(sys.argv[1]) if line.startswith("{")]
code, took, command = sys.argv[2:]
about = {"card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "torch": torch.__version__}
for line in lines:
    print(json.dumps(about | json.loads(line)))
if code != "0":
    print(json.dumps(about | {"failed": code, "after_seconds": int(took), "command": command.split("\n")[-1]}))
PY
    [ "$code" = 0 ] || tail -n 15 "$scratch/err" >&2
}

bench() { # limit, script, arguments
    row "$1" "$venv_python" "benchmarks/$2" --device "$DEVICE" "${@:3}"
}

use_cuda=True maps="3m 5m_vs_6m" battles="4096 16384" many=16384 some=4096 batch=128 updates=20
interval=50000
[ "$DEVICE" = cuda ] || use_cuda=False
if [ "$SMALL" = 1 ]; then maps=3m battles=16 many=16 some=16 batch=8 updates=2 interval=4000; fi
few=(--batch "$batch" --rounds 3)

for map in $maps; do
    sizes=(--map "$map" --updates "$updates")
    bench 40 qmix_update.py "${sizes[@]}" --batch "$batch" "${pymarl3[@]}"
    bench 40 ppo_update.py "${sizes[@]}" "${epymarl[@]}"
    # shellcheck disable=SC2086
    bench 60 resident.py --map "$map" "${few[@]}" --slots $battles
    bench 40 resident.py --map "$map" "${few[@]}" --slots $((2 * many)) -- "resident_slots=$many"
done
bench 40 qmix_update.py "${sizes[@]}" --batch "$batch" --precision bf16 "${pymarl3[@]}"
for config in gnn_qmix omagd_small; do
    bench 50 resident.py --map "$map" --slots "$some" --config "$config" "${few[@]}"
done
row 75 "$venv_python" benchmarks/time_to_win.py runner=resident "batch_size_run=$((some / 8))" \
    updates_per_iteration=64 "test_interval=$interval" "use_cuda=$use_cuda" --limit 20
if "$venv_python" -c 'import jaxmarl' 2>/dev/null; then
    bench 60 resident.py --env smax --map 3m --slots "$some" "${few[@]}"
fi
printf '%d row(s) failed after %d s; kept in %s\n' "$failed" "$SECONDS" "$OUT" >&2
exit "$failed"

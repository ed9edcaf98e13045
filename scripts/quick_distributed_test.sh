#!/usr/bin/env bash
# Whether this machine, or several of them together, can train: under a minute, ends in PASS or FAIL (exit code 0 or 1).
#
#   scripts/quick_distributed_test.sh                                                        two processes here
#   scripts/quick_distributed_test.sh --nodes 2 --node-rank 0 --master-addr 10.0.0.1         on the first host, and
#   scripts/quick_distributed_test.sh --nodes 2 --node-rank 1 --master-addr 10.0.0.1         on the second
#
#   --gpus G         ranks on each host (2 on one host, 1 on each of several)
#   --master-port P  a port of host 0 whose next one is free too (29510)
#   --results DIR    folder that all hosts share (several hosts: results; one host: a temporary one)
# Variables: NUM_GPUS PYTHON VENV
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

nodes=1 node_rank=0 master_addr=127.0.0.1 port=29510 results='' temporary='' ranks=''
if [ -n "${NUM_GPUS:-}" ]; then ranks=$(whole NUM_GPUS "$NUM_GPUS" 1 1024); fi
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --nodes | --node-rank | --master-addr | --master-port | --gpus | --results)
            [ $# -ge 2 ] || fail "$1 needs a value; see --help"
            ;;
        *) fail "$1: not understood; see --help" ;;
    esac
    case $1 in
        --nodes) nodes=$(whole "$1" "$2" 1 65536) ;;
        --node-rank) node_rank=$(whole "$1" "$2" 0 65535) ;;
        --master-addr) master_addr=$2 ;;
        --master-port) port=$(whole "$1" "$2" 1 65534) ;;
        --gpus) ranks=$(whole "$1" "$2" 1 1024) ;;
        --results) results=$2 ;;
    esac
    shift 2
done
[ "$node_rank" -lt "$nodes" ] || fail "--node-rank $node_rank: must be below --nodes $nodes"
[ "$nodes" -eq 1 ] || [ "$master_addr" != 127.0.0.1 ] || fail "--nodes $nodes needs --master-addr: the address of host 0"
check_host --master-addr "$master_addr"
python=$(find_python)
require_omagd "$python"
if [ -z "$ranks" ]; then ranks=$((nodes == 1 ? 2 : 1)); fi
world=$((nodes * ranks))
[ "$world" -ge 2 ] || fail "training on several ranks needs at least 2: --gpus 2"
share=()
gpus=$(count_gpus "$python")
if [ "$gpus" -gt 0 ] && [ "$gpus" -lt "$ranks" ]; then share=(dist_backend=gloo); fi
if [ "$nodes" -gt 1 ]; then
    choose_interface "$master_addr" "$node_rank"
    results=${results:-results}
elif [ -z "$results" ]; then
    results=$(mktemp -d)
    temporary=$results
fi
started=$SECONDS
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

bad() { # what has failed
    printf 'WRONG %s\nFAIL after %d s\n' "$1" "$((SECONDS - started))"
    exit 1
}

scratch=$(mktemp -d)
output=$scratch/output
trap 'rm -rf "$scratch" ${temporary:+"$temporary"}' EXIT
"$python" -m torch.distributed.run --nnodes="$nodes" --node-rank="$node_rank" --nproc-per-node="$ranks" \
    --master-addr="$master_addr" --master-port="$port" --log-dir="$scratch" "$root/scripts/probe_ranks.py" \
    ${share[@]+"${share[@]}"} 2>"$output" || {
    tail -n 20 "$output" >&2
    bad "the ranks did not find each other: see docs/many_machines.md (network, GLOO_SOCKET_IFNAME)"
}

"$root/launch.sh" --nodes "$nodes" --node-rank "$node_rank" --master-addr "$master_addr" --master-port "$((port + 1))" \
    --gpus "$ranks" --max-restarts 0 --config qmix --env-config skirmish \
    env_args.map_name=3m t_max=300 batch_size_run=2 batch_size=4 buffer_size=8 test_nepisode=4 log_interval=100 \
    distributed_debug=True dist_timeout_minutes=0.5 auto_resume=False \
    local_results_path="$results" ${share[@]+"${share[@]}"} >"$output" 2>&1 || {
    tail -n 20 "$output" >&2
    bad "the training failed"
}

# What the training says of itself, on the host that has written it.
folder=$(sed -n 's/.*results: \(.*\)/\1/p' "$output" | tail -n 1)
if [ "$node_rank" -eq 0 ]; then
    "$python" - "$folder" "$world" <<'PYTHON' || bad "the training has not left what it should: $folder"
import json, pathlib, sys

folder, world = pathlib.Path(sys.argv[1]), int(sys.argv[2])
summary = json.loads((folder / "summary.json").read_text())
logs = sorted(path.name for path in (folder / "logs").glob("rank_*.log"))
assert (summary["exit_state"], summary["world_size"], summary["updates"] > 0) == ("completed", world, True), summary
assert len(logs) == world, logs
print(f"ok    {summary['updates']} updates on {world} ranks, parameters equal on all of them after each")
PYTHON
fi
printf 'PASS in %d s\n' "$((SECONDS - started))"

#!/usr/bin/env bash
# Trains on several hosts: run it on each of them with its own --node-rank. Host 0 has the address --master-addr.
#
#   ./launch.sh --nodes 2 --gpus 4 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 --config omagd t_max=500000
#   ./launch.sh --nodes 2 --gpus 4 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --config omagd t_max=500000
#
#   --nodes N         hosts (1)                     --config C        a name or a YAML file (omagd)
#   --gpus G          ranks on this host: GPUs, or  --env-config E    a name or a YAML file (sc2 where it can be
#                     processes where there is none                   played, else skirmish)
#   --node-rank R     which host this is, from 0    --max-restarts M  how often killed ranks start again (3)
#   --master-addr A   address of host 0             --debug           log more, check more
#   --master-port P   a free port there (29500)     --dry-run         check, show the command, start nothing
#
# Everything else is key=value for the training. What is shown is also written to <results>/logs/launch_<date>_node<R>.log.
# Variables: CONFIG ENV_CONFIG NUM_GPUS RESULTS_PATH GLOO_SOCKET_IFNAME PYTHON VENV
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/scripts/lib.sh"

nodes=1 node_rank='' master_addr='' master_port=29500 max_restarts=3 debug='' dry_run=''
CONFIG=${CONFIG:-omagd}
RESULTS_PATH=${RESULTS_PATH:-results}
updates=()
while [ $# -gt 0 ]; do
    case $1 in
        --nodes=* | --gpus=* | --node-rank=* | --master-addr=* | --master-port=* | --config=* | --env-config=* | --max-restarts=*)
            flag=${1%%=*} value=${1#*=} taken=1
            ;;
        --nodes | --gpus | --node-rank | --master-addr | --master-port | --config | --env-config | --max-restarts)
            [ $# -ge 2 ] || fail "$1 needs a value; see ./launch.sh --help"
            flag=$1 value=$2 taken=2
            ;;
        --debug) debug=1 flag='' taken=1 ;;
        --dry-run) dry_run=1 flag='' taken=1 ;;
        -h | --help)
            usage
            exit 0
            ;;
        with) flag='' taken=1 ;;
        local_results_path=*) RESULTS_PATH=${1#*=} updates+=("$1") flag='' taken=1 ;;
        [A-Za-z_]*=*) updates+=("$1") flag='' taken=1 ;;
        *) fail "$1: not understood; give flags of ./launch.sh --help and key=value" ;;
    esac
    case $flag in
        --nodes) nodes=$(whole "$flag" "$value" 1 65536) ;;
        --gpus) NUM_GPUS=$(whole "$flag" "$value" 1 1024) ;;
        --node-rank) node_rank=$(whole "$flag" "$value" 0 65535) ;;
        --master-addr) master_addr=$value ;;
        --master-port) master_port=$(whole "$flag" "$value" 1 65535) ;;
        --config) CONFIG=$value ;;
        --env-config) ENV_CONFIG=$value ;;
        --max-restarts) max_restarts=$(whole "$flag" "$value" 0 1000) ;;
    esac
    shift "$taken"
done
if [ "$nodes" -gt 1 ]; then
    [ -n "$node_rank" ] || fail "--nodes $nodes needs --node-rank: 0 on the host of --master-addr, 1, 2, … on the others"
    [ -n "$master_addr" ] || fail "--nodes $nodes needs --master-addr: the address of host 0 in the network of these hosts"
    check_host --master-addr "$master_addr"
fi
node_rank=${node_rank:-0}
[ "$node_rank" -lt "$nodes" ] || fail "--node-rank $node_rank: must be below --nodes $nodes (the first host is 0)"
python=$(find_python)
choose_workers "$python"
choose_env "$python"

if [ -n "$debug" ]; then
    export PYTHONFAULTHANDLER=1 TORCH_SHOW_CPP_STACKTRACES=1
    # Not DETAIL: with it ranks of torch 2.13 crash where DistributedDataParallel is set up.
    export NCCL_DEBUG=${NCCL_DEBUG:-INFO} TORCH_DISTRIBUTED_DEBUG=${TORCH_DISTRIBUTED_DEBUG:-INFO}
    updates=(distributed_debug=True log_memory_usage=True ${updates[@]+"${updates[@]}"})
fi
arguments=("$root/src/main.py" --config="$CONFIG" --env-config="$ENV_CONFIG" with
    run=ddp local_results_path="$RESULTS_PATH" auto_resume=True max_restarts="$max_restarts")
if [ "$nodes" -eq 1 ]; then
    # On one host the ranks are spawned: they meet where nobody else can come in.
    command=("$python" "${arguments[@]}" world_size="$NUM_GPUS" ${updates[@]+"${updates[@]}"})
else
    choose_interface "$master_addr" "$node_rank"
    command=("$python" -m torch.distributed.run --nnodes="$nodes" --node-rank="$node_rank"
        --nproc-per-node="$NUM_GPUS" --master-addr="$master_addr" --master-port="$master_port"
        --max-restarts="$max_restarts" "${arguments[@]}" ${updates[@]+"${updates[@]}"})
    # torchrun would start again what is refused: what can be refused is refused here, in one line.
    MASTER_ADDR=$master_addr MASTER_PORT=$master_port RANK=0 LOCAL_RANK=0 \
        WORLD_SIZE=$((nodes * NUM_GPUS)) LOCAL_WORLD_SIZE=$NUM_GPUS \
        "$python" "$root/src/main.py" --dry-run "${arguments[@]:1}" ${updates[@]+"${updates[@]}"} >/dev/null || exit
fi
if [ -n "$dry_run" ]; then
    [ "$nodes" -gt 1 ] || "$python" "$root/src/main.py" --dry-run "${command[@]:2}" >/dev/null || exit
    [ -z "${GLOO_SOCKET_IFNAME:-}" ] || printf 'GLOO_SOCKET_IFNAME=%q ' "$GLOO_SOCKET_IFNAME"
    printf '%q ' "${command[@]}"
    printf '\n'
    exit 0
fi
if [ "$nodes" -gt 1 ]; then # torchrun leaves a folder behind; with_log.py removes it
    command=("${command[@]:0:3}" '--log-dir={scratch}' "${command[@]:3}")
fi
log=$RESULTS_PATH/logs/launch_$(date +%Y%m%d_%H%M%S)_node$node_rank.log
exec "$python" "$root/scripts/with_log.py" "$log" "${command[@]}"

#!/usr/bin/env bash
# Trains the graph agents by QMIX on reconstructed observations, from a tokenizer and a mask predictor.
#
#   ./run_gnn_stage3_ddp.sh    # with the newest ones in RESULTS_PATH that fit environment, map and sizes
#   TOKENIZER_PATH=results/<run>/models/pretrain_stage1_best \
#   MASK_PREDICTOR_PATH=results/<run>/models/pretrain_stage2_best ./run_gnn_stage3_ddp.sh
#
# Further arguments are --config C, --env-config E, --dry-run and key=value: ./run_gnn_stage3_ddp.sh t_max=500000
# The same command resumes a stopped or killed run from its newest checkpoint (auto_resume=False starts a new run).
# Variables: TOKENIZER_PATH MASK_PREDICTOR_PATH NUM_GPUS CONFIG ENV_CONFIG MAP_NAME DDP_PORT RESULTS_PATH PYTHON VENV DRY_RUN
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/scripts/lib.sh"

CONFIG=${CONFIG:-omagd}
DDP_PORT=${DDP_PORT:-12355}
RESULTS_PATH=${RESULTS_PATH:-results}
read_arguments "$@"
[ -z "${MASK_PREDICTOR_PATH:-}" ] || [ -n "${TOKENIZER_PATH:-}" ] ||
    fail 'MASK_PREDICTOR_PATH needs TOKENIZER_PATH: the tokenizer with which it was trained'
python=$(find_python)
choose_workers "$python"
choose_env "$python"

if [ -z "${TOKENIZER_PATH:-}" ] || [ -z "${MASK_PREDICTOR_PATH:-}" ]; then
    found=$("$python" "$root/scripts/find_pretrained.py" "$RESULTS_PATH" --config="$CONFIG" --env-config="$ENV_CONFIG" with \
        ${MAP_NAME:+"env_args.map_name=$MAP_NAME"} \
        ${updates[@]+"${updates[@]}"} \
        ${TOKENIZER_PATH:+"pretrained_tokenizer_path=$TOKENIZER_PATH"})
    TOKENIZER_PATH=${found%$'\n'*} MASK_PREDICTOR_PATH=${found#*$'\n'}
fi

exec "$python" "$root/src/main.py" --config="$CONFIG" --env-config="$ENV_CONFIG" ${DRY_RUN:+--dry-run} with \
    recontructer_stage=stage3 \
    run=ddp \
    learner=nq_graph_learner_ddp \
    mac=gnn_graph_mac \
    agent=gnn_rnn \
    use_ddp=True \
    world_size="$NUM_GPUS" \
    ddp_port="$DDP_PORT" \
    auto_resume=True \
    local_results_path="$RESULTS_PATH" \
    pretrained_tokenizer_path="$TOKENIZER_PATH" \
    pretrained_mask_predictor_path="$MASK_PREDICTOR_PATH" \
    ${MAP_NAME:+"env_args.map_name=$MAP_NAME"} \
    ${updates[@]+"${updates[@]}"}

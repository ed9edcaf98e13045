#!/usr/bin/env bash
# Pre-trains the graph modules: STAGE=stage1 the tokenizer, STAGE=stage2 the mask predictor (needs TOKENIZER_PATH).
#
#   STAGE=stage1 NUM_GPUS=2 ./run_pretrain_ddp.sh
#   STAGE=stage2 TOKENIZER_PATH=results/<run>/models/pretrain_stage1_best ./run_pretrain_ddp.sh
#
# Further arguments are --config C, --env-config E, --dry-run and key=value: ./run_pretrain_ddp.sh graph_pretrain_epochs=50
# The same command resumes a stopped or killed run from its newest checkpoint (auto_resume=False starts a new run).
# Variables: STAGE NUM_GPUS TOKENIZER_PATH CONFIG ENV_CONFIG MAP_NAME DDP_PORT RESULTS_PATH PYTHON VENV DRY_RUN
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/scripts/lib.sh"

STAGE=${STAGE:-stage1}
CONFIG=${CONFIG:-omagd_origin}
DDP_PORT=${DDP_PORT:-12355}
RESULTS_PATH=${RESULTS_PATH:-results}
read_arguments "$@"
tokenizer=()
case $STAGE in
    stage1) ;;
    stage2)
        [ -n "${TOKENIZER_PATH:-}" ] || fail 'STAGE=stage2 needs TOKENIZER_PATH=… (a tokenizer.th of stage1, or its folder)'
        tokenizer=("pretrained_tokenizer_path=$TOKENIZER_PATH")
        ;;
    *) fail "STAGE=$STAGE: must be stage1 or stage2" ;;
esac
python=$(find_python)
choose_workers "$python"
choose_env "$python"

exec "$python" "$root/src/main.py" --config="$CONFIG" --env-config="$ENV_CONFIG" ${DRY_RUN:+--dry-run} with \
    recontructer_stage="$STAGE" \
    run=ddp \
    learner=nq_graph_learner_ddp \
    use_ddp=True \
    world_size="$NUM_GPUS" \
    ddp_port="$DDP_PORT" \
    auto_resume=True \
    local_results_path="$RESULTS_PATH" \
    ${MAP_NAME:+"env_args.map_name=$MAP_NAME"} \
    ${tokenizer[@]+"${tokenizer[@]}"} \
    ${updates[@]+"${updates[@]}"}

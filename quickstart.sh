#!/usr/bin/env bash
# Sets up .venv, installs, and runs all three stages on the embedded battle 3m with two workers.
# Further arguments are --config C, --env-config E, --dry-run and key=value: ./quickstart.sh t_max=200000
# Variables: VENV (where the virtual environment is), PYTHON (what it is made from), RESULTS_PATH, DRY_RUN
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/scripts/lib.sh"

RESULTS_PATH=${RESULTS_PATH:-results}
CONFIG=omagd_small ENV_CONFIG=skirmish
read_arguments "$@"
setup_venv full
gpus=$(count_gpus "$venv_python")
share=()
if [ "$gpus" -eq 1 ]; then share=(dist_backend=gloo); fi

"$venv_python" "$root/src/main.py" --config="$CONFIG" --env-config="$ENV_CONFIG" ${DRY_RUN:+--dry-run} with \
    env_args.map_name=3m \
    run=ddp \
    learner=nq_graph_learner_ddp \
    world_size=2 \
    local_results_path="$RESULTS_PATH" \
    ${share[@]+"${share[@]}"} \
    ${updates[@]+"${updates[@]}"}

#!/usr/bin/env bash
# Trains DDPG on 3v3 snakes on all GPUs, or with two CPU workers; takes the published flags.
#
#   ./train_ddp.sh                                   ./train_ddp.sh --max_episodes 20000 --gpus 0,2
#
#   --gpus 0,2              GPUs to use; default: all in CUDA_VISIBLE_DEVICES
#   --max_episodes N        t_max = 200 N: a game has 200 steps        --batch_size N   of each rank
#   --save_interval N       save_model_interval = 200 N                --buffer_size N  steps
#   --epsilon E             epsilon_start                              --epsilon_speed E  factor for one step
#   --a_lr L  --c_lr L      lr and critic_lr                           --gamma G  --tau T
#   --opponent_difficulty_strategy S   none | linear | exponential | curriculum | self_play
#   --enable_opponent_evasion          --opponent_evasion_start_episode N
#   --load_model            continue from --load_model_run RUN (a run's folder, or its name in RESULTS_PATH) with its full
#                           state; with --load_model_run_episode N from the weights nearest to that episode, empty replay
#   --config C              snakes_ddpg (default) | snakes_ddpg_planb | snakes_ddpg_defaults | snakes_ddpg_8ranks | a YAML file
#   --dry-run               check, show, start nothing
#
# Everything else is key=value for the training. Episodes count over all ranks. The same command resumes a stopped or
# killed run from its newest checkpoint (auto_resume=False starts a new run). By torchrun, on some of the GPUs:
#   CUDA_VISIBLE_DEVICES=0,2 torchrun --nproc_per_node=2 src/main.py --config=snakes_ddpg --env-config=snakes with run=ddp
# Variables: CONFIG ENV_CONFIG NUM_GPUS DDP_PORT RESULTS_PATH CUDA_VISIBLE_DEVICES PYTHON VENV DRY_RUN
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/scripts/lib.sh"

CONFIG=${CONFIG:-snakes_ddpg}
ENV_CONFIG=${ENV_CONFIG:-snakes}
DDP_PORT=${DDP_PORT:-12355}
RESULTS_PATH=${RESULTS_PATH:-results}
steps=200
gpus='' load='' load_run='' load_episode=''
updates=()

take() { # flag, value: translates it
    local number
    case $1 in
        --max_episodes | --save_interval | --load_model_run_episode) number=$(whole "$1" "$2" 1 999999999) ;;
    esac
    case $1 in
        --gpus) gpus=$2 ;;
        --config) CONFIG=$2 ;;
        --max_episodes) updates+=("t_max=$((number * steps))") ;;
        --save_interval) updates+=("save_model_interval=$((number * steps))") ;;
        --epsilon) updates+=("epsilon_start=$2") ;;
        --a_lr) updates+=("lr=$2") ;;
        --c_lr) updates+=("critic_lr=$2") ;;
        --load_model_run) load_run=$2 ;;
        --load_model_run_episode) load_episode=$number ;;
        *) updates+=("${1#--}=$2") ;;
    esac
}

while [ $# -gt 0 ]; do
    case $1 in
        --load_model | --load_model=[Tt]rue) load=1 taken=1 ;;
        --load_model=[Ff]alse) load='' taken=1 ;;
        --enable_opponent_evasion) updates+=(enable_opponent_evasion=True) taken=1 ;;
        --enable_opponent_evasion=*) updates+=("${1#--}") taken=1 ;;
        --dry-run) DRY_RUN=1 taken=1 ;;
        -h | --help)
            usage
            exit 0
            ;;
        --gpus=* | --config=* | --max_episodes=* | --batch_size=* | --epsilon=* | --epsilon_speed=* | --a_lr=* | --c_lr=* | \
            --gamma=* | --tau=* | --save_interval=* | --buffer_size=* | --opponent_difficulty_strategy=* | \
            --opponent_evasion_start_episode=* | --load_model_run=* | --load_model_run_episode=*)
            take "${1%%=*}" "${1#*=}"
            taken=1
            ;;
        --gpus | --config | --max_episodes | --batch_size | --epsilon | --epsilon_speed | --a_lr | --c_lr | \
            --gamma | --tau | --save_interval | --buffer_size | --opponent_difficulty_strategy | \
            --opponent_evasion_start_episode | --load_model_run | --load_model_run_episode)
            [ $# -ge 2 ] || fail "$1 needs a value; see ./train_ddp.sh --help"
            take "$1" "$2"
            taken=2
            ;;
        with) taken=1 ;;
        [A-Za-z_]*=*) updates+=("$1") taken=1 ;;
        *) fail "$1: not understood; give flags of ./train_ddp.sh --help and key=value" ;;
    esac
    shift "$taken"
done

if [ -n "$load" ]; then
    [ -n "$load_run" ] || fail '--load_model needs --load_model_run: the folder of a run, or its name in RESULTS_PATH'
    [ -d "$load_run" ] || load_run=$RESULTS_PATH/$load_run
    [ -d "$load_run" ] || fail "--load_model_run ${load_run#"$RESULTS_PATH/"}: no such run in $RESULTS_PATH"
    updates=("checkpoint_path=$load_run" ${load_episode:+"load_step=$((load_episode * steps))"} ${updates[@]+"${updates[@]}"})
elif [ -n "$load_run$load_episode" ]; then
    fail '--load_model_run and --load_model_run_episode need --load_model: give that too'
fi
python=$(find_python)
choose_gpus "$python" "$gpus"
choose_workers "$python" ''

exec "$python" "$root/src/main.py" --config="$CONFIG" --env-config="$ENV_CONFIG" ${DRY_RUN:+--dry-run} with \
    run=ddp \
    learner=ddpg_learner_ddp \
    use_ddp=True \
    world_size="$NUM_GPUS" \
    ddp_port="$DDP_PORT" \
    auto_resume=True \
    local_results_path="$RESULTS_PATH" \
    ${updates[@]+"${updates[@]}"}

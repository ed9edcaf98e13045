# shellcheck shell=bash
# What the batch scripts share; sourced, never run.

ranks_per_node() { # how many ranks a host gets: NUM_GPUS, else the GPUs that SLURM gives, else nothing (launch.sh looks)
    printf '%s\n' "${NUM_GPUS:-${SLURM_GPUS_ON_NODE:-}}"
}

first_host() { # the host of rank 0
    local hosts
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    printf '%s\n' "${hosts%%$'\n'*}"
}

job_number() { # the job's number; fails where SLURM_JOB_ID is none: arithmetic would execute what stands in brackets
    case ${SLURM_JOB_ID:-} in
        '' | *[!0-9]* | ????????????????*)
            printf 'error: SLURM_JOB_ID=%q: must be the number of a job\n' "${SLURM_JOB_ID:-}" >&2
            exit 2
            ;;
    esac
    printf '%s\n' "$((10#$SLURM_JOB_ID))"
}

rendezvous_port() { # number of the job: its port; other jobs on the same hosts get another one
    printf '%s\n' "$((10000 + $1 % 20000))"
}

run_and_requeue() { # command: runs it; near the time limit (SIGUSR1) ends it in order, and queues the job again
    local child near_limit='' code job
    job=$(job_number)
    # Since SLURM 22.05 srun does not take this from sbatch: all ranks would share one core.
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    "$@" &
    child=$!
    # To the tasks, which save a checkpoint and end with 143; srun itself would kill them at a SIGTERM.
    trap 'near_limit=1; scancel --signal=TERM "$job" || true' USR1
    trap 'scancel --signal=TERM "$job" || true' TERM
    while true; do
        code=0
        wait "$child" || code=$?
        kill -0 "$child" 2>/dev/null || break # `wait` also returns when a signal has been handled
    done
    wait "$child" 2>/dev/null || code=$? # what the command itself has ended with
    # `scancel` also ends in 143: only a job stopped by its time limit is queued again.
    if [ -n "$near_limit" ] && [ "$code" -eq 143 ]; then
        printf 'stopped before the time limit; queueing job %s again\n' "$job"
        scontrol requeue "$job"
    fi
    exit "$code"
}

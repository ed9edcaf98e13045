#!/usr/bin/env bash
# Creates .venv with everything that the tests need, and runs them. Arguments go to pytest: ./run_tests.sh -m 'not processes'
# --gpu, as the first argument, runs the checks that need an NVIDIA GPU instead (at most 6 minutes), and ends with a table.
#   It installs nothing: the Python (PYTHON, else the virtual environment's, else python3) needs torch for CUDA,
#   numba-cuda, pytest, pytest-xdist and pytest-timeout.
# Variables: VENV (folder of the virtual environment), PYTHON (the Python that creates it),
#   TEST_PROCESSES (number of test files that run in parallel: 4; of checks with --gpu: 8)
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/scripts/lib.sh"

case ${1:-} in
    -h | --help)
        usage
        exit 0
        ;;
    --gpu)
        shift
        use_python
        cd "$root"
        OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "$venv_python" -m pytest tests/gpu -rs -n "${TEST_PROCESSES:-8}" \
            --dist worksteal --max-worker-restart=0 --timeout=150 --session-timeout=330 "$@"
        ;;
esac
setup_venv "dev,smax"
cd "$root"
# Without restarts: after a crash xdist deals out finished files again, and a process that is dealt one waits for ever.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "$venv_python" -m pytest -n "${TEST_PROCESSES:-4}" \
    --dist loadfile --no-loadscope-reorder --max-worker-restart=0 "$@"

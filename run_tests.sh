#!/usr/bin/env bash
# Creates .venv with everything that the tests need, and runs them. Arguments go to pytest: ./run_tests.sh -m 'not processes'
# Variables: VENV (folder of the virtual environment), PYTHON (the Python that creates it),
#   TEST_PROCESSES (number of test files that run in parallel: 3)
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/scripts/lib.sh"

case ${1:-} in
    -h | --help)
        usage
        exit 0
        ;;
esac
setup_venv "dev,smax"
cd "$root"
# Without restarts: after a crash xdist deals out finished files again, and a process that is dealt one waits for ever.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "$venv_python" -m pytest -n "${TEST_PROCESSES:-3}" \
    --dist loadfile --no-loadscope-reorder --max-worker-restart=0 "$@"

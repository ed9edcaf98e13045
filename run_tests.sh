#!/usr/bin/env bash
# Sets up .venv with what the tests need, and runs them. Arguments go to pytest: ./run_tests.sh -m 'not processes'
# Variables: VENV (where the virtual environment is), PYTHON (what it is made from),
#   TEST_PROCESSES (how many files run side by side: 3)
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
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "$venv_python" -m pytest -n "${TEST_PROCESSES:-3}" --dist loadfile --no-loadscope-reorder "$@"

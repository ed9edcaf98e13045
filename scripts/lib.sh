# shellcheck shell=bash
# Functions shared by the scripts of this repository; source it. `root` is the repository.

unset CDPATH # with it `cd` prints where it goes
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

fail() { # message, exit code (2): print to stderr without control characters, which a terminal would execute
    printf 'error: %s\n' "${1//[[:cntrl:]]/?}" >&2
    exit "${2:-2}"
}

venv_dir() { # print the folder of the virtual environment: $VENV, else .venv in the repository
    printf '%s\n' "${VENV:-$root/.venv}"
}

usage() { # print the comment at the top of the running script
    sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"
}

# shellcheck disable=SC2034 # the scripts use these variables
read_arguments() { # arguments of a script: set updates, and CONFIG, ENV_CONFIG and DRY_RUN if they are given
    updates=()
    while [ $# -gt 0 ]; do
        case $1 in
            -h | --help)
                usage
                exit 0
                ;;
            --dry-run) export DRY_RUN=1 ;;
            --config | --env-config)
                [ $# -ge 2 ] || fail "$1 needs a value; see $0 --help"
                set -- "$1=$2" "${@:3}"
                continue
                ;;
            --config=*) CONFIG=${1#*=} ;;
            --env-config=*) ENV_CONFIG=${1#*=} ;;
            with) ;;
            [A-Za-z_]*=*) updates+=("$1") ;;
            *) fail "$1: not understood; give key=value, or see $0 --help" ;;
        esac
        shift
    done
}

is_supported_python() { # python: succeed if it exists and has a supported version
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

check_python() { # fail if PYTHON is set and not usable
    [ -z "${PYTHON:-}" ] || is_supported_python "$PYTHON" ||
        fail "PYTHON=$PYTHON: does not start as Python 3.11 to 3.13; name another one, or leave PYTHON out"
}

find_python() { # print the Python to run: $PYTHON, else the virtual environment's, else python3
    local venv
    venv=$(venv_dir)
    if [ -n "${PYTHON:-}" ]; then
        check_python
        printf '%s\n' "$PYTHON"
    elif [ -x "$venv/bin/python" ]; then
        printf '%s\n' "$venv/bin/python"
    else
        printf 'python3\n'
    fi
}

base_python() { # print the Python that creates a new virtual environment
    local name
    if [ -n "${PYTHON:-}" ]; then
        printf '%s\n' "$PYTHON"
        return
    fi
    for name in python3.11 python3.12 python3.13 python3; do
        if is_supported_python "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    return 1
}

setup_venv() { # extras ("full" or "dev,smax"): create the virtual environment and install, once; set venv_python
    local extras=$1 venv base wanted stamp
    unset PYTHONDONTWRITEBYTECODE # with it every start would compile all files that it imports
    check_python
    venv=$(venv_dir)
    venv_python=$venv/bin/python
    if ! is_supported_python "$venv_python"; then
        base=$(base_python) || fail 'no Python 3.11 to 3.13 here; install one, or name it: PYTHON=/path/to/python'
        # The newest pip needs half of the time of those that Python brings.
        "$base" -m venv --clear --upgrade-deps "$venv" >/dev/null || fail "$base cannot make a virtual environment (on Debian: apt install python3-venv)"
    fi
    "$venv_python" -m pip --version >/dev/null 2>&1 || "$venv_python" -m ensurepip >/dev/null 2>&1 ||
        fail "$venv has no pip (on Debian: apt install python3-venv, then remove $venv)"
    stamp=$venv/.installed-$extras
    wanted=$(cd "$root" && cksum pyproject.toml setup.py constraints.txt && printf '%s\n' "$root")
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ] || [ ! -d "$root/.package/omagd" ]; then
        printf 'installing into %s (once; some minutes, mostly torch) ...\n' "$venv" >&2
        # Python compiles a file when it first imports it, and keeps the result; all of them would take a minute.
        "$venv_python" -m pip install --quiet --no-compile --disable-pip-version-check \
            -e "$root[$extras]" -c "$root/constraints.txt" || fail 'the installation failed, see above'
        # Several processes would compile these files at the same time, each for itself.
        "$venv_python" -c 'import numba, torch' || fail 'torch and Numba are installed, but do not load, see above'
        printf '%s\n' "$wanted" >"$stamp"
    fi
}

use_python() { # use an installed Python as it is, with `omagd` from this repository: set venv_python
    venv_python=$(find_python)
    [ -d "$root/.package/omagd" ] || { mkdir -p "$root/.package" && ln -sfn ../src "$root/.package/omagd"; }
    export PYTHONPATH=$root/.package${PYTHONPATH:+:$PYTHONPATH}
}

require_omagd() { # python: fail unless it has this package
    "$1" -c 'import importlib.util as util, sys; sys.exit(util.find_spec("omagd") is None)' >/dev/null ||
        fail "the package omagd is not installed for $1: pip install -e $root"
}

count_gpus() { # python: print the number of GPUs that CUDA_VISIBLE_DEVICES allows
    local found
    found=$("$1" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)' 2>/dev/null) || found=0
    case $found in
        '' | *[!0-9]* | ?????*) found=0 ;;
    esac
    printf '%s\n' "$found"
}

choose_gpus() { # python, list of GPUs or nothing: restrict the run to these GPUs; fail if one does not exist
    local given=${2:-} listed found
    [ -n "$given" ] || return 0
    case $given in
        *[!0-9,]* | ,* | *, | *,,*) fail "--gpus $given: must be numbers of GPUs with commas in between, as in 0,2" ;;
    esac
    listed=$(printf '%s\n' "$given" | tr ',' '\n' | sort -u | wc -l)
    found=$(CUDA_VISIBLE_DEVICES=$given count_gpus "$1")
    [ "$found" -eq "$listed" ] || fail "--gpus $given: only $found of these $((listed)) GPUs are on this machine"
    export CUDA_VISIBLE_DEVICES=$given
}

choose_workers() { # python, hint: set NUM_GPUS if it is unset: the number of GPUs, else two CPU workers
    require_omagd "$1" # else every machine seems to have no GPU
    if [ -n "${NUM_GPUS:-}" ]; then
        NUM_GPUS=$(whole NUM_GPUS "$NUM_GPUS" 1 1024)
        return
    fi
    NUM_GPUS=$(count_gpus "$1")
    if [ "$NUM_GPUS" -eq 0 ]; then
        NUM_GPUS=2
        printf 'no GPU here: 2 CPU workers%s\n' "${2- (CONFIG=omagd_small has the sizes for that)}" >&2
    fi
}

choose_env() { # python: set ENV_CONFIG if it is unset: sc2 if the game can be played, else skirmish
    # RANK, WORLD_SIZE: one process is not rejected within srun's tasks.
    [ -z "${ENV_CONFIG:-}" ] || return 0
    ENV_CONFIG=skirmish
    if [ -d "${SC2PATH:-$HOME/StarCraftII}/Versions" ] &&
        RANK=0 WORLD_SIZE=1 "$1" "$root/src/main.py" --config=qmix --env-config=sc2 --dry-run >/dev/null 2>&1; then
        ENV_CONFIG=sc2
    fi
    printf 'environment: %s%s\n' "$ENV_CONFIG" \
        "$([ "$ENV_CONFIG" = sc2 ] || printf ' (the embedded battle; StarCraft II cannot be played here)')" >&2
}

whole() { # name, text, minimum, maximum: print the text if it is a whole number within the bounds
    # Only digits may reach the arithmetic, which would execute the command in `a[$(command)]`.
    case $2 in
        '' | *[!0-9]* | ??????????*) fail "$1 $2: must be a whole number from $3 to $4" ;;
    esac
    [ "$((10#$2))" -ge "$3" ] && [ "$((10#$2))" -le "$4" ] || fail "$1 $2: must be a whole number from $3 to $4"
    printf '%s\n' "$((10#$2))"
}

check_host() { # flag, text: fail unless the text can be the name or address of a host
    case $2 in
        '' | -* | *[!A-Za-z0-9.:_-]*) fail "$1 $2: must be the name or the address of a host" ;;
    esac
}

choose_interface() { # address of host 0, number of this host: set GLOO_SOCKET_IFNAME if it is unset
    # By default gloo uses the address of the host's name, which on many systems is a loopback address.
    local found=''
    [ -z "${GLOO_SOCKET_IFNAME:-}" ] && command -v ip >/dev/null 2>&1 || return 0
    local address
    address=$(getent ahosts "$1" 2>/dev/null | awk 'NR == 1 { print $1 }') || true
    address=${address:-$1}
    if [ "$2" -eq 0 ]; then
        found=$(ip -o addr show to "$address" 2>/dev/null | awk 'NR == 1 { print $2 }') || true
    else
        found=$(ip -o route get "$address" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p') || true
    fi
    if [ -n "$found" ]; then export GLOO_SOCKET_IFNAME=$found; fi
}

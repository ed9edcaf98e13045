#!/usr/bin/env bash
# launch.sh under its published name, with the same flags:
#
#   scripts/launch_distributed_training.sh --config omagd --gpus 4
#   scripts/launch_distributed_training.sh --config omagd --nodes 2 --gpus 4 --node-rank 0 \
#       --master-addr 192.168.1.100 --master-port 12355 --debug --dry-run
#
# See ./launch.sh --help.
set -euo pipefail
unset CDPATH
exec "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)/launch.sh" "$@"

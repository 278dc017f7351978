#!/usr/bin/env bash
# Train on one machine with torchrun: bash launch/single_node.sh CONFIG [key=value ...]
# `.venv/bin/megarl train CONFIG` does the same; this script also accepts torchrun's options, such as
# TORCHRUN_ARGS="--log-dir logs --redirects 3". megarl/launch/exit_status.py defines how a run ends and its exit status.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 1 ] || { echo "error: no configuration; usage: bash launch/single_node.sh CONFIG [key=value ...]" >&2 && exit 2; }
. launch/ranks_here.sh
unset NODE_RANK
ranks=$(ranks_here 1 "$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# shellcheck disable=SC2086  # TORCHRUN_ARGS is a list of words
exec .venv/bin/python -m megarl.torchrun --standalone --nproc-per-node "$ranks" ${TORCHRUN_ARGS:-} -m megarl.train "$@"

#!/usr/bin/env bash
# Train on several machines without a scheduler. Run this on each of them, with the same folder, CONFIG and overrides.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash launch/multi_node.sh CONFIG [key=value ...]     on the first
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash launch/multi_node.sh CONFIG [key=value ...]     on the second
#
# MASTER_ADDR is an address of the first node that the others can reach, MASTER_PORT (29500) a free port on it.
# MEGARL_SPARES=1 on all nodes: the node with NODE_RANK=2 (NNODES) waits, and replaces one that fails.
# Nodes authenticate with a secret in your home directory; if they share none, export the same MEGARL_SECRET on all.
# If a node has several networks, select one: GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 1 ] || { echo "error: no configuration; usage: NNODES=.. NODE_RANK=.. MASTER_ADDR=.. bash launch/multi_node.sh CONFIG [key=value ...]" >&2 && exit 2; }
for name in NNODES NODE_RANK MASTER_ADDR; do
    [ -n "${!name:-}" ] || { echo "error: set $name, as the head of launch/multi_node.sh shows" >&2 && exit 2; }
done
export NODE_RANK MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}
. launch/ranks_here.sh
ranks=$(ranks_here "$NNODES" "$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m megarl.torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$ranks" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m megarl.train "$@"

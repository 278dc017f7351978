#!/usr/bin/env bash
# The DeepSeek-V3 671B recipe on 64 nodes of 8 GPUs, or another configuration on other nodes:
#
#   sbatch slurm/ppo_moe.sh
#   sbatch --nodes=16 slurm/ppo_moe.sh configs/qwen3_235b.yaml run.dir=/scratch/me/qwen3 [key=value ...]
#   sbatch --nodes=2 --gres=none slurm/ppo_moe.sh configs/quickstart.yaml parallel.ranks_per_node=1      no GPUs
#
# Submit it from the project's folder, on a file system that all nodes share, after `bash launch/install.sh` on a node
# like those of the job. What sbatch is told on the command line goes before the lines here. The job saves itself
# before its time is up, goes back into the queue and continues from there.
#
#SBATCH --job-name=megarl
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --time=24:00:00
# The run stops at the end of a step and saves: leave time for one step and one checkpoint.
#SBATCH --signal=B:USR1@1800
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail
[ -n "${SLURM_JOB_ID:-}" ] || { echo "error: this is for Slurm: sbatch slurm/ppo_moe.sh [CONFIG] [key=value ...]" >&2 && exit 2; }
cd "${MEGARL_ROOT:-$SLURM_SUBMIT_DIR}"
[ -x .venv/bin/python ] || { echo "error: no .venv in $PWD: run bash launch/install.sh there, and submit from there" >&2 && exit 2; }

config=${1:-configs/deepseek_v3_671b.yaml}
[ $# -eq 0 ] || shift
# A requeued job must go on where it was; a first one starts afresh, as there is nothing to resume.
case " $*" in *" run.resume="*) ;; *) set -- run.resume=auto "$@" ;; esac
set -- "$config" "$@"

unset NODE_RANK
. launch/ranks_here.sh
nodes=$SLURM_JOB_NUM_NODES
ranks=$(ranks_here "$nodes" "$@")
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The node's address as Slurm knows it: a host name may be unknown to the other nodes, or stand for two of them.
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
port=$((20000 + SLURM_JOB_ID % 10000))

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Where nodes have several networks, export these before sbatch, with the name of the fast one:
#   GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0
echo "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}: $nodes nodes x $ranks ranks, rendezvous at $address:$port"

# USR1 reaches every process of the step, and is for the ranks, which save; nothing shall die of it before they are up.
# A step gets one CPU unless it asks for them all.
launch='trap "" USR1
    exec .venv/bin/python -m megarl.torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
        --nproc-per-node "$0" --master-addr "$1" --master-port "$2" -m megarl.train "${@:3}"'
srun --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none --kill-on-bad-exit=1 \
    bash -c "$launch" "$ranks" "$address" "$port" "$@" &
step=$!

asked=
ask_to_stop() {
    asked=yes
    echo "job $SLURM_JOB_ID: time is nearly up, asking the ranks to save and stop"
    scancel --signal=USR1 "$SLURM_JOB_ID.0"
}
trap ask_to_stop USR1

status=0
while kill -0 $step 2>/dev/null; do
    wait $step && status=0 || status=$?  # a trapped signal ends `wait` early
done
if [ -n "$asked" ] && [ $status -ne 0 ]; then
    echo "job $SLURM_JOB_ID: back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status

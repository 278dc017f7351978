#!/usr/bin/env bash
# The DeepSeek-V3 671B recipe on 64 nodes of 8 GPUs, or another configuration on other nodes:
#
#   sbatch slurm/ppo_moe.sh
#   sbatch --nodes=16 slurm/ppo_moe.sh configs/qwen3_235b.yaml run.dir=/scratch/me/qwen3 [key=value ...]
#   sbatch --nodes=2 --gres=none slurm/ppo_moe.sh configs/quickstart.yaml parallel.ranks_per_node=1      no GPUs
#
# Submit it from the project's folder, on a file system that all nodes share, after `bash launch/install.sh` on a node
# like those of the job. What sbatch is told on the command line goes before the lines here. The job saves itself before
# its time is up, and goes back into the queue then, and after a crash (MEGARL_REQUEUES times, 20). launch/README.md
# has more: containers (MEGARL_SRUN, MEGARL_INSIDE), networks, and what starts again by itself before that.
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
config=${1:-configs/deepseek_v3_671b.yaml}
[ $# -eq 0 ] || shift
# A requeued job must go on where it was; a first one starts afresh, as there is nothing to resume.
case " $*" in *" run.resume="*) ;; *) set -- run.resume=auto "$@" ;; esac
set -- "$config" "$@"

unset NODE_RANK
MEGARL_SECRET=${MEGARL_SECRET:-$(od -An -tx8 -N32 /dev/urandom | tr -d ' \n')} && export MEGARL_SECRET
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MEGARL_LEAVE_OUT=$PWD/.leave-out-$SLURM_JOB_ID
rm -f "$MEGARL_LEAVE_OUT"
nodes=${SLURM_JOB_NUM_NODES:-1} count=${SLURM_RESTART_COUNT:-0} check=()
[ -z "${MEGARL_SRUN:-}" ] || check=(srun --nodes=1 --ntasks=1)  # the container's Python, not this node's
# shellcheck disable=SC2086  # MEGARL_SRUN and MEGARL_INSIDE are lists of words
ranks=$("${check[@]}" ${MEGARL_SRUN:-} ${MEGARL_INSIDE:-} \
    bash -c '. launch/ranks_here.sh && ranks_here "$@"' check "$nodes" "$@")
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The node's address as Slurm knows it: a host name may be unknown to the other nodes, or stand for two of them.
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
port=$((20000 + SLURM_JOB_ID % 10000))
echo "job $SLURM_JOB_ID, start $count: $nodes nodes x $ranks ranks on $SLURM_JOB_NODELIST, rendezvous at $address:$port"

# USR1 reaches every process of the step, and is for the ranks, which save; nothing shall die of it before they are up.
# A step gets one CPU unless it asks for them all. The launchers end alike on all nodes; --wait is for one that cannot.
launch='trap "" USR1
    exec .venv/bin/python -m megarl.torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
        --nproc-per-node "$0" --master-addr "$1" --master-port "$2" -m megarl.train "${@:3}"'
# shellcheck disable=SC2086
srun --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none --kill-on-bad-exit=0 --wait=120 \
    ${MEGARL_SRUN:-} ${MEGARL_INSIDE:-} bash -c "$launch" "$ranks" "$address" "$port" "$@" &
step=$!
asked=
trap 'asked=yes
    echo "job $SLURM_JOB_ID: time is nearly up, asking the ranks to save and stop"
    scancel --signal=USR1 "$SLURM_JOB_ID.$((${#check[@]} > 0))"' USR1
status=0
while kill -0 $step 2>/dev/null; do
    wait $step && status=0 || status=$?  # a trapped signal ends `wait` early
done

case $status in  # of megarl/launch/exit_status.py
0 | 2 | 86) exit "$status" ;;  # done; a mistake; what would come again
85 | 130 | 143) [ -n "$asked" ] || exit "$status" ;;  # somebody wanted it so
*) [ -n "$asked" ] || [ "$count" -lt "${MEGARL_REQUEUES:-20}" ] || { echo "job $SLURM_JOB_ID: was requeued $count times" && exit "$status"; } ;;
esac
# A node that had all faults is left out, where there is another for it; Slurm takes that of a job that waits only.
leave=$(cat "$MEGARL_LEAVE_OUT" 2>/dev/null) || leave=
[ "$(sinfo -h -p "$SLURM_JOB_PARTITION" -t idle,alloc,mix,comp -o %D | awk '{n += $1} END {print n + 0}')" -gt "$nodes" ] || leave=
echo "job $SLURM_JOB_ID: back into the queue after status $status${leave:+, without $leave}"
trap "" TERM  # by which Slurm ends this script now
scontrol requeue "$SLURM_JOB_ID"
for ((try = 0; ${#leave} && try < 20; try++)); do
    sleep 1 && scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$leave" && break
done
exit "$status"

#!/usr/bin/env bash
# Slurm job for the DeepSeek-V3 671B recipe on 64 nodes of 8 GPUs, or for another configuration on other nodes:
#
#   sbatch slurm/ppo_moe.sh
#   sbatch --nodes=16 slurm/ppo_moe.sh configs/qwen3_235b.yaml run.dir=/scratch/me/qwen3 [key=value ...]
#   sbatch --nodes=2 --gres=none slurm/ppo_moe.sh configs/quickstart.yaml parallel.ranks_per_node=1      without GPUs
#
# Submit it from the project's folder, on a file system that all nodes share, after `bash launch/install.sh` on a node
# like those of the job. Options on sbatch's command line take precedence over the SBATCH lines below. Shortly before
# its time limit the job saves a checkpoint and requeues itself. After a crash it requeues itself, too, if it was
# requeued fewer than MEGARL_REQUEUES (20) times. launch/README.md describes containers (MEGARL_SRUN, MEGARL_INSIDE),
# networks, spare nodes (MEGARL_SPARES), and restarts without a requeue.
#
#SBATCH --job-name=megarl
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --time=24:00:00
# USR1 comes 1,800 s before the time limit. The run then finishes its step and saves: allow enough time for both.
#SBATCH --signal=B:USR1@1800
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail
[ -n "${SLURM_JOB_ID:-}" ] || { echo "error: this is for Slurm: sbatch slurm/ppo_moe.sh [CONFIG] [key=value ...]" >&2 && exit 2; }
cd "${MEGARL_ROOT:-$SLURM_SUBMIT_DIR}"
config=${1:-configs/deepseek_v3_671b.yaml}
[ $# -eq 0 ] || shift
if [ -n "${MEGARL_SWEEP:-}" ]; then  # a task of `megarl sweep --sbatch`
    mapfile -t overrides <"$MEGARL_SWEEP/$(printf %04d "$SLURM_ARRAY_TASK_ID").overrides"
    set -- "$@" "${overrides[@]}"
fi
# A requeued job must resume from its checkpoint; a new job has none, so `auto` starts it from the beginning.
case " $*" in *" run.resume="*) ;; *) set -- run.resume=auto "$@" ;; esac
set -- "$config" "$@"

unset NODE_RANK
MEGARL_SECRET=${MEGARL_SECRET:-$(od -An -tx8 -N32 /dev/urandom | tr -d ' \n')} && export MEGARL_SECRET
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export MEGARL_LEAVE_OUT=$PWD/.leave-out-$SLURM_JOB_ID MEGARL_STATUS=$PWD/.status-$SLURM_JOB_ID
rm -f "$MEGARL_LEAVE_OUT" "$MEGARL_STATUS"
spares=${MEGARL_SPARES:-0} count=${SLURM_RESTART_COUNT:-0} check=()
case $spares in *[!0-9]*) echo "error: MEGARL_SPARES=$spares must be the number of spare nodes" >&2 && exit 2; esac
all=${SLURM_JOB_NUM_NODES:-1} nodes=$((${SLURM_JOB_NUM_NODES:-1} - 10#$spares))
[ "$all" = "$nodes" ] || [ "$nodes" -ge 2 ] ||
    { echo "error: MEGARL_SPARES=$spares of $all nodes leaves less than two to train: lower it, or raise --nodes" >&2 && exit 2; }
[ -z "${MEGARL_SRUN:-}" ] || check=(srun --nodes=1 --ntasks=1)  # check with the container's Python, not this node's
# shellcheck disable=SC2086  # MEGARL_SRUN and MEGARL_INSIDE are lists of words
ranks=$("${check[@]}" ${MEGARL_SRUN:-} ${MEGARL_INSIDE:-} \
    bash -c '. launch/ranks_here.sh && ranks_here "$@"' check "$nodes" "$@")
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Use the address that Slurm has for the node: other nodes may not resolve its host name, or two nodes may share it.
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
port=$((20000 + SLURM_JOB_ID % 10000))
echo "job $SLURM_JOB_ID, start $count: $nodes nodes x $ranks ranks, $spares spare nodes, on $SLURM_JOB_NODELIST, rendezvous at $address:$port"

# USR1 asks the ranks to save but reaches every process of the step: ignore it until the ranks handle it. A step gets
# only one CPU unless it requests more. The launchers of all nodes end together; --wait is for one that cannot. With
# spares the others outlive a lost node.
limit=(--wait=120)
[ "$all" = "$nodes" ] || limit=(--wait=0 --no-kill)
launch='trap "" USR1
    exec .venv/bin/python -m megarl.torchrun --nnodes "$1" --node-rank "$SLURM_NODEID" \
        --nproc-per-node "$0" --master-addr "$2" --master-port "$3" -m megarl.train "${@:4}"'
# shellcheck disable=SC2086
srun --ntasks="$all" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none --kill-on-bad-exit=0 "${limit[@]}" \
    ${MEGARL_SRUN:-} ${MEGARL_INSIDE:-} bash -c "$launch" "$ranks" "$nodes" "$address" "$port" "$@" &
step=$!
(until [ -e "$MEGARL_STATUS" ]; do sleep 5; done; sleep 120; kill $step) 2>/dev/null & # a launcher that hangs
watcher=$!
asked=
trap 'asked=yes
    echo "job $SLURM_JOB_ID: time is nearly up, asking the ranks to save and stop"
    scancel --signal=USR1 "$SLURM_JOB_ID.$((${#check[@]} > 0))"' USR1
status=0
while kill -0 $step 2>/dev/null; do
    wait $step && status=0 || status=$?  # a trapped signal ends `wait` early
done
kill $watcher 2>/dev/null || true
status=$(cat "$MEGARL_STATUS" 2>/dev/null || echo "$status")  # that of the run, also if a node was lost and replaced
rm -f "$MEGARL_STATUS"

case $status in  # exit statuses of megarl/launch/exit_status.py
0 | 2 | 86) exit "$status" ;;  # done; a user error; a repeated fault
85 | 130 | 143) [ -n "$asked" ] || exit "$status" ;;  # stopped by a user, unless the time limit is near
*) [ -n "$asked" ] || [ "$count" -lt "${MEGARL_REQUEUES:-20}" ] || { echo "job $SLURM_JOB_ID: was requeued $count times" && exit "$status"; } ;;
esac
# Exclude a node that had all faults if the partition has another one. Slurm accepts this for pending jobs only.
leave=$(cat "$MEGARL_LEAVE_OUT" 2>/dev/null) || leave=
[ "$(sinfo -h -p "$SLURM_JOB_PARTITION" -t idle,alloc,mix,comp -o %D | awk '{n += $1} END {print n + 0}')" -gt "$all" ] || leave=
echo "job $SLURM_JOB_ID: back into the queue after status $status${leave:+, without $leave}"
trap "" TERM  # a requeue makes Slurm end this script with SIGTERM
scontrol requeue "$SLURM_JOB_ID"
for ((try = 0; ${#leave} && try < 20; try++)); do
    sleep 1 && scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$leave" && break
done
exit "$status"

#!/usr/bin/env bash
# From nothing to a trained policy: installs, makes a tiny MoE and its task, warms it up by SFT, trains it by PPO and
# shows what came of it. A second call skips what is there already and trains again, in a new run folder.
#
#   bash launch/quickstart.sh [key=value ...]     overrides of configs/quickstart.yaml, such as algorithm=grpo run.seed=2
#   QUICKSTART_DIR=runs/other bash launch/quickstart.sh
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/install.sh

dir=${QUICKSTART_DIR:-runs/quickstart}
python() { .venv/bin/python -W ignore "$@"; }
train() { python -m megarl.train "$@"; }

# The configs are for two CPU cores. On GPUs: bf16, since attention kernels of packed sequences have no fp32, and on a
# single GPU one rank, since two ranks of NCCL cannot share it.
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
here=()
[ "$gpus" -eq 0 ] || here+=(model.dtype=bfloat16)
[ "$gpus" -ne 1 ] || here+=("parallel={world_size: 1, ranks_per_node: 1, tp: 1, ep: 1}")

# train.jsonl is the last that make_quickstart.py puts in place.
if [ ! -e "$dir/train.jsonl" ]; then
    echo "quickstart: making a tiny model, its tokenizer and its task in $dir"
    python tools/make_quickstart.py "$dir"
fi

if [ ! -e "$dir/sft/export/config.json" ]; then
    echo "quickstart: warming it up by SFT"
    rm -rf "$dir/sft"
    train configs/quickstart_sft.yaml ${here[@]+"${here[@]}"} "run.dir=$dir/sft" "model.path=$dir/model" "data.train=$dir/sft.jsonl"
fi

number=1
while [ -e "$dir/run-$number" ]; do number=$((number + 1)); done
run=$dir/run-$number
for override in "$@"; do
    case $override in run.dir=*) run=${override#run.dir=} ;; esac
done
echo "quickstart: training it by RL in $run"
for own in "run.dir=$run" "model.path=$dir/sft/export" "data.train=$dir/train.jsonl" "data.eval=$dir/eval.jsonl"; do
    case " $*" in *" ${own%%=*}="*) ;; *) set -- "$@" "$own" ;; esac
done
train configs/quickstart.yaml ${here[@]+"${here[@]}"} "$@"

python tools/report.py "$run"

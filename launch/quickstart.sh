#!/usr/bin/env bash
# Run the quickstart: install, create a tiny MoE and its task, train it with SFT, then with PPO, and print a report. A
# second call reuses the model, the task and the SFT result, and trains with PPO again in a new run folder.
#
#   bash launch/quickstart.sh [key=value ...]     override configs/quickstart.yaml, such as algorithm=grpo run.seed=2
#   QUICKSTART_DIR=runs/other bash launch/quickstart.sh     use another folder
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/install.sh

dir=${QUICKSTART_DIR:-runs/quickstart}
python() { .venv/bin/python -W ignore "$@"; }
train() { python -m megarl.train "$@"; }

# The configs are for two CPU cores. GPUs need bf16, because attention kernels for packed sequences do not support fp32.
# A single GPU has one rank. Two can share it (parallel.ranks_per_gpu=2), which is slower: launch/README.md.
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
here=()
[ "$gpus" -eq 0 ] || here+=(model.dtype=bfloat16)
[ "$gpus" -ne 1 ] || here+=("parallel={world_size: 1, ranks_per_node: 1, tp: 1, ep: 1}")

# make_quickstart.py writes train.jsonl last.
if [ ! -e "$dir/train.jsonl" ]; then
    echo "quickstart: making a tiny model, its tokenizer and its task in $dir"
    python tools/make_quickstart.py "$dir"
fi

if [ ! -e "$dir/sft/export/config.json" ]; then
    echo "quickstart: warming it up by SFT (the first line comes when the ranks have started: 10 to 60 seconds)"
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

python -m megarl report "$run"

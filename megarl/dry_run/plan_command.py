"""Plan the memory of a model's training ranks, on paper: no GPU, no weights, no process.

    megarl plan --model qwen3-235b --gpus 128 --gpu-gb 80            # proposes layouts
    megarl plan --model deepseek-v3 --algorithm ppo --gpu-gb 141 --rollout tp=32,ep=32 \\
        --layout world=512,tp=8,pp=16,ep=32 world=512,tp=8,pp=8,ep=64                          # which of these fit
    megarl plan --model tiny/config.json --layout world=2,tp=2 --measure   # and is it true?

For a model without a configuration; `megarl.train CONFIG --dry-run parallel=auto` chooses by the same rule for all of
a configuration. Prints a rank's bytes by part, for actor, critic and reference together, as `--dry-run` does. All ranks
of a pipeline stage need the same. It plans for colocated roles; `--dry-run` also plans for roles on separate ranks
(`placement`). With --measure the model is built here on the CPU and its tensors are counted.
"""

from __future__ import annotations

import argparse
import sys

from megarl.config.command_line import Parser, float_in_range, int_in_range, parse_path_text, run_cli
from megarl.config.keys import RECOMPUTE_MODES
from megarl.config.shipped_files import list_model_configs

MOST_GPUS = 1 << 20


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__, prog="megarl plan")
    parser.add_argument(
        "--model",
        type=parse_path_text,
        required=True,
        help=f"{', '.join(list_model_configs())}, or a config.json or its folder",
    )
    parser.add_argument(
        "--layout", nargs="+", default=[], metavar="SIZES", help="world=512,tp=8,pp=16,ep=32[,cp=,etp=,vpp=], several"
    )
    parser.add_argument(
        "--gpus",
        type=int_in_range(0, MOST_GPUS),
        default=0,
        help="to search for layouts of, or world of each --layout",
    )
    parser.add_argument("--gpu-gb", type=float_in_range(), default=80, help="GB of a GPU (default %(default)g)")
    parser.add_argument("--gpus-per-node", type=int_in_range(most=MOST_GPUS), default=8)
    parser.add_argument(
        "--algorithm", choices=("ppo", "grpo", "distill", "sft"), default="grpo", help="default %(default)s"
    )
    parser.add_argument(
        "--frozen",
        nargs="+",
        default=[],
        metavar="ROLE=MODEL",
        help="models that are not trained, of reference, reward, teacher, in the policy's layout",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rollout", default="", metavar="SIZES", help="tp=32[,ep=32]; default: the smallest that fits")
    parser.add_argument("--recompute", choices=RECOMPUTE_MODES, default="", help="default: the least that fits")
    parser.add_argument(
        "--tokens", type=int_in_range(), default=16384, help="of a micro-batch on a rank (default %(default)s)"
    )
    parser.add_argument(
        "--context", type=int_in_range(0), default=0, help="the longest conversation (default: --tokens)"
    )
    parser.add_argument(
        "--kv-tokens", type=int_in_range(), default=131072, help="of an engine's cache (default %(default)s)"
    )
    parser.add_argument(
        "--logits-chunk-size", type=int_in_range(), default=512, help="train.logits_chunk_size (%(default)s)"
    )
    parser.add_argument(
        "--bucket-mb",
        type=int_in_range(most=MOST_GPUS),
        default=1024,
        help="MiB staged for sending, and for receiving",
    )
    parser.add_argument(
        "--batch-tokens", type=int_in_range(), default=1 << 20, help="of an optimizer step (%(default)s)"
    )
    parser.add_argument(
        "--offload-fraction",
        type=float,
        default=0.0,
        help="of optimizer states, on the host (actor_optimizer.offload_fraction)",
    )
    parser.add_argument("--fsdp", action="store_true", help="train.fsdp")
    parser.add_argument("--measure", action="store_true", help="build it on this CPU and compare; small models only")
    parser.add_argument("--json", action="store_true", help="figures for a program, instead of tables")
    parser.set_defaults(given=arguments)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    from megarl.dry_run import plan_layouts  # imports torch

    return plan_layouts.run(options)


def main(arguments: list[str]) -> int:
    return run_cli(lambda: run(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Check that all families compute the same in all layouts, in training and in the engine; exits with 0 if they do.

    .venv/bin/python tools/check_parity.py [--family qwen3_moe ...] [--layout cp=2 ...] [--engine none] [--readme FILE]

Uses tiny random models in fp32. In each layout, as ranks on this machine, Megatron's log-probs, loss, every gradient
and one step of its distributed optimizer are compared with `transformers`, one sequence at a time, and with torch's
AdamW; SGLang's log-probs of the same tokens, with the same weights, are compared with `transformers`. Since both are
compared with the same reference, trainer and engine differ by at most the sum of the two gaps.

A full run takes about twenty minutes on two cores. The tests run a part of it (`tests/megatron/test_model.py`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from local_ranks import run
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config import ConfigError
from megarl.config.command_line import Parser, check_writable_file, run_cli
from megarl.models.registry import family_of

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests/megatron/ranks_layout.py"
sys.path.insert(0, str(SCRIPT.parent))

LAYOUTS = {
    "": 1,
    "tp=2": 2,
    "pp=2": 2,
    "cp=2,selective": 2,
    "overlap": 2,
    "ep=2,recompute": 2,
    "tp=2,ep=2": 2,
    "pp=3,vpp=2": 3,
    "tp=2,etp=2,ep=2": 4,
    "tp=2,cp=2,ep=2": 4,
    "pp=2,cp=2": 4,
    "tp=2,pp=2,cp=2,ep=2": 8,
}
"""Number of ranks by layout; ranks not taken by tp, pp and cp are data parallel. Words are switches of
`ranks_layout.py`."""

ENGINES = ("tp=1", "tp=2", "tp=2,ep=2")

BOUNDS = {
    "planned weights": 0.0,  # allocated bytes against the plan of `models.memory`, relative
    "planned gradients": 0.05,  # in models this small, the padding of Megatron's buffers shows
    "planned optimizer": 0.05,  # likewise, and one of two ranks has more parameters, the other more padding
    "logprobs": 1e-5,
    "entropy": 1e-5,
    "temperature": 1e-5,  # log-probs at temperature 0.7
    "values": 1e-5,
    "scores": 1e-5,  # of a reward model
    "serving": 0.0,  # the same without gradients and optimizer
    "loss": 5e-6,
    "mtp_loss": 5e-6,
    "metric": 5e-6,
    "grad_norm": 1e-5,  # relative
    "gradients": 5e-6,  # largest difference of any gradient over the largest gradient
    "step": 1e-4,  # largest difference of any weight after one clipped AdamW step, in units of the learning rate
    "packing": 5e-6,  # loss with other micro-batches
    "packing_step": 1e-4,
    "in flight": 0.0,  # micro-batches that a rank still holds, beyond those in flight in the schedule
    "vocabulary": 5e-6,  # vocab_parallel_logprobs with padding that fills a rank, part of one, or nothing
    "swapped": 0.0,  # forward with the initial weights swapped in, after a step
    "replay same experts": 0.0,  # log-probs, loss, gradients with the model's own experts replayed, against no replay
    "replay logprobs": 1e-5,  # with random experts replayed, against transformers with the same
    "replay loss": 5e-6,
    "replay gradients": 5e-6,
    "replay recompute full": 0.0,  # against the same without recomputation
    "replay recompute moe": 0.0,
    "indices same keys": 0.0,  # log-probs, loss, gradients with the model's own keys replayed, against no replay
    "indices logprobs": 1e-5,  # with random keys replayed, against transformers with the same
    "indices loss": 5e-6,
    "indices gradients": 5e-6,
    "indices recompute full": 0.0,
    "indices indexer loss": 5e-6,  # the divergence that trains indexers, against the same written out
    "indices indexer gradients": 1e-5,  # of indexers, relative to their largest
    "indices indexer effect": 5e-6,  # of training the indexers on other gradients
    "cut logprobs": 1e-5,  # truncated sampling: part of the vocabulary, different for each token, against transformers
    "cut entropy": 1e-5,
    "cut loss": 5e-6,
    "cut gradients": 5e-6,
    "cut packing": 5e-6,  # log-probs in other micro-batches
}
"""Largest difference that counts as equal. Weights are of order 0.1, log-probs of order 5."""

FLAGS = ("skipped", "unchanged", "resumed", "parked")
"""1 if a step without finite gradients was skipped and changed nothing, if a step after loading a checkpoint gave the
same bits, and if a model that was offloaded computes the same."""

SHOWN = ("logprobs", "values", "loss", "gradients", "step")
MARKS = "<!-- parity: tools/check_parity.py --readme -->", "<!-- /parity -->"


def misses(numbers: dict[str, float]) -> list[str]:
    """Return the names of values that exceed their bound, or are NaN."""
    gaps = [name for name, bound in BOUNDS.items() if name in numbers and not numbers[name] <= bound]
    return gaps + [name for name in FLAGS if name in numbers and numbers[name] != 1.0]


def title(layout: str) -> str:
    """Format `tp=2,ep=2` as TP2 x EP2."""
    sizes = [part.replace("=", "").upper() for part in layout.split(",") if "=" in part]
    flags = [part for part in layout.split(",") if part and "=" not in part]
    ranks = LAYOUTS.get(layout, 1)
    name = " x ".join(sizes) or (f"DP{ranks}" if ranks > 1 else "one process")
    return f"{name}, {' '.join(flags)}" if flags else name


def run_layout(layout: str, families: Iterable[str]) -> dict[str, dict[str, float]]:
    """Run the ranks of a layout. Return values by family."""
    with tempfile.TemporaryDirectory() as folder:
        actors = " ".join(f"{family}:actor" for family in families)
        results = run([str(SCRIPT), layout, actors, folder], LAYOUTS[layout])
    return {name.partition(":")[0]: numbers for name, numbers in results.items()}


def run_engine(family: str, layout: str) -> dict[str, float]:
    """Run an engine in a separate process: Megatron's shim and `transformers` do not work in one process."""
    results: dict[str, float] = run([__file__, "--engine-of", family, layout], 1)
    return results


def engine_gap(family: str, layout: str) -> dict[str, float]:
    """Return the largest difference between SGLang's and transformers' log-probs of the tokens that the layouts are
    checked on."""
    sys.path.insert(0, str(ROOT / "tests/helpers"))
    import images
    import reference
    import tiny
    import tiny_models
    import torch

    from megarl.config import from_dict
    from megarl.cpu.sglang_images import request_images
    from megarl.engine.engine_backends import engine_backend
    from megarl.types import unpack_images

    batch, model = tiny.batch(), tiny.hf_model(family)
    if "vision_config" in tiny.HF[family]:
        patch = tiny.HF[family]["vision_config"]["patch_size"]
        batch = images.add(batch, patch)
    sizes = {name: int(size) for name, size in (part.split("=") for part in layout.split(","))}
    with torch.no_grad():
        truth, _ = reference.policy(model, batch)
    with tempfile.TemporaryDirectory() as folder:
        path = str(tiny_models.save(model, Path(folder) / "model"))
        rollout: dict[str, Any] = {"max_context": 64, "max_new_tokens": 8, "concurrency": 8, **sizes}
        if any(Path(path).glob("*.py")):  # the class of config.json, if transformers has none
            rollout["sglang"] = {"trust_remote_code": True}
        settings = {"run": {"dir": folder}, "model": {"path": path, "dtype": "float32"}, "rollout": rollout}
        config = from_dict(settings)
        engine = engine_backend(config).make_engine(config, threads=1)
        engine.start()
        try:
            engine.wait_ready()
            gaps = [0.0]
            for number, (start, stop) in enumerate(reference.sequences(batch)):
                tokens = batch.tokens[start:stop].tolist()
                body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
                inputs = () if batch.images is None else unpack_images(batch.images[number])
                # SGLang has other ids in place of image tokens, whose log-probs mean nothing.
                skipped = {0, *(t for image in inputs for t in range(image.start, image.stop))}
                if inputs:
                    body["image_data"] = request_images(inputs, None)
                request = urllib.request.Request(
                    engine.url + "/generate",
                    json.dumps({**body, "logprob_start_len": 0}).encode(),
                    {"Content-Type": "application/json", "Authorization": f"Bearer {engine.api_key}"},
                )
                with urllib.request.urlopen(request, timeout=120) as response:
                    entries = json.load(response)["meta_info"]["input_token_logprobs"]
                gaps += [abs(pair[0] - float(truth[start + t])) for t, pair in enumerate(entries) if t not in skipped]
        finally:
            engine.shutdown()
    return {"logprobs": max(gaps)}


def table(results: dict[str, dict[str, dict[str, float]]]) -> Table:
    """Build a table with a row per family and layout. results: layout's title -> family -> values."""
    result = Table(box=box.SIMPLE_HEAD)
    for column in ("family", "layout", *SHOWN, "missed"):
        result.add_column(column, justify="left" if column in ("family", "layout", "missed") else "right")
    families = list(dict.fromkeys(family for by_family in results.values() for family in by_family))
    for family in families:
        for layout, by_family in results.items():
            if numbers := by_family.get(family):
                cells = [f"{numbers[name]:.1e}" if name in numbers else "" for name in SHOWN]
                result.add_row(family, layout, *cells, ", ".join(misses(numbers)))
        result.add_section()
    return result


def markdown(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the table of megarl/megatron/README.md: a row per family, a column per layout, each cell the largest
    log-prob gap."""
    families = list(dict.fromkeys(family for by_family in results.values() for family in by_family))
    lines = [["", *results], ["---"] * (len(results) + 1)]
    for family in families:
        cells = [results[layout].get(family) for layout in results]
        lines.append([family, *(f"{cell['logprobs']:.0e}" if cell else "-" for cell in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    import tiny

    parser = Parser(__doc__)
    parser.add_argument("--family", nargs="+", choices=list(tiny.HF), default=list(tiny.HF), metavar="F")
    parser.add_argument("--layout", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), metavar="L")
    parser.add_argument("--engine", nargs="+", choices=[*ENGINES, "none"], default=list(ENGINES), metavar="L")
    parser.add_argument("--readme", type=Path, help="write the table into this file, between its two marks")
    parser.add_argument("--engine-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine_of:
        print("RESULT " + json.dumps(engine_gap(*options.engine_of)))
        return 0
    return check(options)


def text_with_marks(file: Path) -> str:
    """Return the text of the file that the table is inserted into. Raises ConfigError."""
    check_writable_file(file, "--readme")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"--readme {file} is no text; name a file with the two marks") from None
    if any(text.count(mark) != 1 for mark in MARKS):
        raise ConfigError(f"--readme {file} must have each of the two marks once: {' and '.join(MARKS)}")
    return text


def check(options: argparse.Namespace) -> int:
    import tiny

    if options.readme:
        text_with_marks(options.readme)
    console = Console(width=None if sys.stdout.isatty() else 120)
    results: dict[str, dict[str, dict[str, float]]] = {}

    def has_drafts(family: str) -> bool:
        return family_of(tiny.HF[family]).num_mtp_layers(tiny.HF[family]) > 0

    def is_supported(family: str, layout: str) -> bool:
        if "pp=" in layout and has_drafts(family) and tiny.HF[family]["tie_word_embeddings"]:
            return False
        if "etp=2" in layout:
            try:
                family_of(tiny.HF[family]).params(tiny.HF[family], 1, etp=2)
            except ConfigError:
                return False
        if "vpp=" in layout and family == "qwen3_vl_moe":  # its first three layers must be in one part of a stage
            return False
        return "ep=" not in layout or any("experts" in key for key in tiny.HF[family])

    for layout in options.layout:
        families = [family for family in options.family if is_supported(family, layout)]
        if families:
            console.print(f"{title(layout)}: {', '.join(families)}", style="dim")
            results[title(layout)] = run_layout(layout, families)
    for layout in options.engine:
        for family in options.family:
            # Draft layers do not change an engine's log-probs.
            if layout != "none" and is_supported(family, layout) and not has_drafts(family):
                console.print(f"engine {title(layout)}: {family}", style="dim")
                results.setdefault(f"engine {title(layout)}", {})[family] = run_engine(family, layout)
    console.print(table(results))
    if options.readme:
        start, end = MARKS
        text = text_with_marks(options.readme)
        pattern = re.compile(f"{re.escape(start)}.*{re.escape(end)}", re.DOTALL)
        options.readme.write_text(pattern.sub(f"{start}\n{markdown(results)}\n{end}", text))
    missed = sum(bool(misses(numbers)) for by_family in results.values() for numbers in by_family.values())
    checked = sum(map(len, results.values()))
    console.print(f"{checked} checked, {missed} beyond a bound")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(run_cli(main))

"""The card of a trained model on the Hugging Face Hub: README.md with metadata, learning curve and configuration.

Everything in it comes from the run folder. Secrets are removed (`redact_config`, `redact_text`), and of absolute paths
only the last two parts are shown.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megarl.config import Config, ConfigError, from_dict, load_config
from megarl.config.paths import is_hub_name
from megarl.config.strict import list_keys
from megarl.controllers.controller import load_requirements
from megarl.data.table import read_rows
from megarl.observe import run_machine
from megarl.observe.run_folder import redact_config
from megarl.observe.run_report import REWARD, WINDOW, Run, load_run, plot
from megarl.observe.trackers.adapter import redact_text
from megarl.utils.text import write_atomically

CURVE, CONFIG = "learning_curve.png", "megarl_config.yaml"
"""Files beside README.md."""
UNLISTED_KEYS = "run.dir", "run.resume", "track.", "expect"
"""Key prefixes that do not belong to a recipe."""
_CACHED = re.compile(r"(models|datasets)--([^/]+?)--([^/]+)")
"""A folder in the Hub's cache."""
RESULTS = {
    "eval/reward_greedy": "held-out reward, greedy",
    "eval/reward_sampled": "held-out reward, sampled",
    "eval/nll": "held-out negative log-likelihood of a token",
    "eval/accuracy": "held-out pairs, accuracy",
}
"""Metrics of evaluations in the card, if the run has them."""


@dataclass(frozen=True)
class CardOptions:
    """Metadata that a run folder does not have. license and base_model may be empty; datasets are names on the Hub."""

    license: str = ""
    base_model: str = ""
    datasets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Training:
    """The subject of a card: a run as far as `step`, its last one if None, whose model has this config.json."""

    run: Run
    config: Config
    model: Mapping[str, Any]
    step: int | None = None

    @property
    def architecture(self) -> str:
        names = self.model.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else ""

    @property
    def pipeline_tag(self) -> str:
        if self.architecture.endswith("ForSequenceClassification"):
            return "text-classification"
        return "image-text-to-text" if "vision_config" in self.model else "text-generation"


def read_training(run_dir: Path, model: Path, step: int | None) -> Training:
    """Read a run folder. model: the HF folder of its policy after `step`. Raises ConfigError."""
    run = load_run(run_dir)
    if step is not None:
        run = replace(run, metrics={number: row for number, row in run.metrics.items() if number <= step})
    tree = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return Training(run, load_config(run_dir / "config.yaml"), tree, step)


# --- what the metadata need


def find_base_model(config: Config) -> str:
    """Return the Hub's name of the model that training started from, also through earlier runs; "" if it has none."""
    for _ in range(8):
        path = Path(config.model.path)
        if name := find_hub_name(str(path), "models"):
            return name
        file = path.parent / "config.yaml"
        if path.name != "export" or not file.is_file():
            return ""
        try:
            config = load_config(file)
        except ConfigError:  # of another version of MegaRL
            return ""
    return ""


def find_hub_name(path: str, kind: str) -> str:
    """Return `organization/name` of a path in the Hub's cache; "" for others. kind: models or datasets.

    A configuration has such a path if the user wrote the Hub's name: `load_config` replaces it.

    >>> find_hub_name("/cache/models--Qwen--Qwen3-30B-A3B/snapshots/0c1", "models")
    'Qwen/Qwen3-30B-A3B'
    """
    match = _CACHED.search(path)
    return f"{match[2]}/{match[3]}" if match and match[1] == kind else ""


def find_datasets(config: Config) -> list[str]:
    """Return the Hub's names of the training data, as far as paths or the first rows' `data_source` show them."""
    names = list[str]()
    for path in config.data.train:
        name = find_hub_name(path, "datasets")
        if not name and Path(path).is_file():
            try:
                source = next(iter(read_rows(Path(path))))[1].get("data_source")
            except (ConfigError, OSError, StopIteration):
                source = None
            name = source if isinstance(source, str) and is_hub_name(source) else ""
        names += [name] if name and name not in names else []
    return names


# --- the configuration


def shorten_paths(value: Any) -> Any:
    """Return a configuration's value whose absolute paths are shortened to their last two parts.

    >>> shorten_paths(["/home/me/data/gsm8k/train.parquet", "a/b"])
    ['.../gsm8k/train.parquet', 'a/b']
    """
    if isinstance(value, str) and value.startswith("/") and len(parts := Path(value).parts) > 3:
        return "/".join(("...", *parts[-2:]))
    if isinstance(value, Mapping):
        return {name: shorten_paths(item) for name, item in value.items()}
    return [shorten_paths(item) for item in value] if isinstance(value, list | tuple) else value


def format_config(config: Config) -> str:
    """Return every key as YAML, without secrets."""
    tree = shorten_paths(redact_config(config))
    return redact_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def format_changed_keys(config: Config) -> str:
    """Return as YAML the algorithm, and the keys that differ from its defaults, without secrets."""
    defaults = dict(list_keys(from_dict({"algorithm": config.algorithm})))
    redacted = redact_config(config)
    tree: dict[str, Any] = {"algorithm": config.algorithm}
    for key, value in list_keys(config):
        if value != defaults.get(key) and not key.startswith(UNLISTED_KEYS):
            *sections, name = key.split(".")
            source, target = redacted, tree
            for section in sections:
                source, target = source[section], target.setdefault(section, {})
            target[name] = source[name]
    return redact_text(yaml.safe_dump(shorten_paths(tree), sort_keys=False, allow_unicode=True))


# --- the card


def make_metadata(training: Training, options: CardOptions) -> dict[str, Any]:
    """Return the metadata of the card. license, base_model and datasets are empty if they are not known."""
    config = training.config
    is_rl = bool(training.run.series(REWARD)[0])
    algorithm = config.algorithm.rpartition(":")[2]
    return {
        "license": options.license,
        "library_name": "transformers",
        "pipeline_tag": training.pipeline_tag,
        "base_model": options.base_model or find_base_model(config),
        "datasets": list(options.datasets) or find_datasets(config),
        "tags": [*(["reinforcement-learning"] if is_rl else []), algorithm, "megarl", "megatron-core"],
    }


def format_metadata(metadata: Mapping[str, Any]) -> str:
    """Return the YAML block at the head of the card, without empty entries."""
    known = {name: value for name, value in metadata.items() if value}
    return f"---\n{yaml.safe_dump(known, sort_keys=False, allow_unicode=True)}---\n"


def list_results(run: Run) -> list[tuple[str, str, str]]:
    """Return (description, first, last) of held-out and training metrics."""
    rows = []
    for name, description in RESULTS.items():
        _, values = run.series(name)
        if values:
            rows.append((description, f"{values[0]:.3f}", f"{values[-1]:.3f}"))
    _, rewards = run.series(REWARD)
    if size := min(WINDOW, len(rewards) // 2):  # first and last steps do not overlap
        first, last = (f"{statistics.fmean(part):.3f}" for part in (rewards[:size], rewards[-size:]))
        rows.append((f"training reward, mean of {size} steps", first, last))
    return rows


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def describe_training(training: Training) -> str:
    """Return a sentence on what was trained, from what, and for how long."""
    config, run = training.config, training.run
    base = find_base_model(config)
    origin = f"[{base}](https://huggingface.co/{base})" if base else f"`{shorten_paths(config.model.path)}`"
    role = load_requirements(config).main_role.replace("_", " ").replace("actor", "policy")
    steps = len(run.series("time/step")[0])
    total = "" if training.step is None else f" of {config.run.num_rollout}"
    parts = [f"The {role} was trained from {origin} by `{config.algorithm}`, for {steps}{total} steps"]
    if run.series(REWARD)[0]:
        samples, prompts = config.rollout.samples_per_prompt, config.data.prompts_per_step
        parts.append(f"of {prompts} prompts with {samples} responses each")
    if config.lora.rank:
        parts.append(f"with LoRA adapters of rank {config.lora.rank}, which are merged into these weights")
    if (minutes := run.minutes()) >= 2:
        parts.append(f"in {minutes:.0f} minutes")
    engine = " and SGLang" if config.rollout.engine == "sglang" and run.series(REWARD)[0] else ""
    return " ".join(parts) + f", with [Megatron-Core](https://github.com/NVIDIA/Megatron-LM){engine} by MegaRL."


def describe_data(config: Config) -> str:
    rows = [("training", path) for path in config.data.train] + [("held out", path) for path in config.data.eval]
    lines = [format_table(("use", "file"), [(use, f"`{shorten_paths(path)}`") for use, path in rows])]
    scorers = [f"`{name}`" for name in config.reward.functions]
    scorers += [f"the model `{shorten_paths(config.reward.model)}`"] if config.reward.model else []
    if scorers:
        lines.append(f"Rewards are computed by {', '.join(scorers)}.")
    tools = [*config.rollout.tools, *config.rollout.environments]
    if tools:
        lines.append(f"Tools and environments: {', '.join(f'`{name}`' for name in tools)}.")
    return "\n\n".join(lines)


def describe_machines(training: Training) -> str:
    """Return versions, commit and hardware: of the run's last start up to its step, or else of this machine."""
    layout = training.config.parallel
    starts = [row for row in run_machine.read(training.run.path) if row.get("step", 0) <= (training.step or 2**53)]
    note = "" if starts else "\n\nThe run recorded no versions: these are of the machine that wrote this card."
    record = starts[-1] if starts else run_machine.describe()
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "etp")}
    split = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "data parallel only"
    gpus = record.get("gpus") or []
    hardware = f"{len(gpus)} x {gpus[0]} per node" if gpus else f"{record.get('cpu')}, {record.get('cores')} cores"
    rows = [
        ("ranks", f"{layout.world_size}, {layout.ranks_per_node} per node ({split})"),
        ("hardware", hardware),
        ("weights' type in training", f"`{training.config.model.dtype}`"),
        ("commit of MegaRL", f"`{record.get('code')}`"),
        *((f"`{name}`", str(version)) for name, version in dict(record.get("versions") or {}).items()),
    ]
    return format_table(("", ""), rows) + note


def format_usage(training: Training, repo: str) -> str:
    """Return Python that loads the model."""
    tag = training.pipeline_tag
    kinds = {"text-classification": "SequenceClassification", "image-text-to-text": "ImageTextToText"}
    kind = f"AutoModelFor{kinds.get(tag, 'CausalLM')}"
    processor = "AutoProcessor" if tag == "image-text-to-text" else "AutoTokenizer"
    lines = [
        f"from transformers import {kind}, {processor}",
        "",
        f'tokenizer = {processor}.from_pretrained("{repo}")',
        f'model = {kind}.from_pretrained("{repo}", dtype="auto", device_map="auto")',
    ]
    if tag == "text-generation":
        lines += [
            'messages = [{"role": "user", "content": "..."}]',
            'options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}',
            "tokens = tokenizer.apply_chat_template(messages, **options).to(model.device)",
            "print(tokenizer.decode(model.generate(**tokens, max_new_tokens=512)[0]))",
        ]
    return "\n".join(lines)


def format_card(training: Training, repo: str, options: CardOptions) -> str:
    """Return README.md. repo: the name on the Hub, for the text."""
    config, run = training.config, training.run
    results = list_results(run)
    curve = [f"![Learning curve]({CURVE})"] if run.series(REWARD)[0] else []
    when = "" if training.step is None else f" (the checkpoint after step {training.step})"
    parts = [
        f"# {repo.rpartition('/')[2]}{when}",
        describe_training(training),
        "## Results",
        *([format_table(("", "before", "after"), results)] if results else ["The run has no evaluation."]),
        *curve,
        "## Use",
        f"```python\n{format_usage(training, repo)}\n```",
        "## Data",
        describe_data(config),
        "## Recipe",
        f"The keys that differ from the defaults of `{config.algorithm}`; [{CONFIG}]({CONFIG}) has all of them:",
        f"```yaml\n{format_changed_keys(config)}```",
        "## Versions and machines",
        describe_machines(training),
    ]
    return redact_text(format_metadata(make_metadata(training, options)) + "\n" + "\n\n".join(parts) + "\n")


def write_card(folder: Path, training: Training, repo: str, options: CardOptions) -> list[Path]:
    """Write README.md, `CONFIG` and, if there are rewards, `CURVE` into a folder, and return the files.

    Raises OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CURVE).unlink(missing_ok=True)
    names = ["README.md", CONFIG]
    write_atomically(folder / "README.md", format_card(training, repo, options))
    write_atomically(folder / CONFIG, format_config(training.config))
    if training.run.series(REWARD)[0]:
        plot([training.run], folder / CURVE)
        names.append(CURVE)
    return [folder / name for name in names]

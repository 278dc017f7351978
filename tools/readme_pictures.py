"""Draw the pictures of the README: the architecture, and from a run of the quickstart its learning curve and its page.

    .venv/bin/python tools/readme_pictures.py RUN [--out docs/images]

RUN is a run folder of `bash launch/quickstart.sh`. Needs Chromium. `sources.json` beside the pictures has a hash of the
code that draws each of them; `tests/docs/test_pictures.py` fails once that code has changed, until they are drawn anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path

from megarl.config import ConfigError
from megarl.config.command_line import Parser, run_cli
from megarl.observe.run_report import load_run, plot
from megarl.view.page import load, write_page

ROOT = Path(__file__).resolve().parent.parent
SOURCES: dict[str, Sequence[str]] = {
    "architecture.svg": ("tools/readme_pictures.py",),
    "learning_curve.png": ("megarl/observe/run_report.py",),
    "viewer.png": ("megarl/view/page.py", "megarl/view/static/*.js", "megarl/view/static/*.css"),
}
"""The code that draws each picture, as patterns of files in the repository."""
BROWSERS = "chromium", "chromium-browser", "google-chrome"


def hash_sources(picture: str) -> str:
    """Return a SHA-256 of the names and contents of the code that draws a picture."""
    digest = hashlib.sha256()
    for pattern in SOURCES[picture]:
        for file in sorted(ROOT.glob(pattern)):
            digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


# --- the architecture: boxes and arrows, in the colours of the reader's theme

STEPS = "generate", "reward", "log-probs, values", "advantages", "update", "weight sync"
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #22252a; }
.title { font-weight: 600; }
.small { font-size: 12px; fill: #6b7280; }
.box { fill: #ffffff; stroke: #c5c9d0; }
.trainer { fill: #eef2fb; stroke: #2563eb; }
.engine { fill: #ecf8f1; stroke: #16a34a; }
.arrow { stroke: #6b7280; stroke-width: 1.5; fill: none; }
.sync { stroke: #2563eb; stroke-width: 2; fill: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #dfe2e7; }
  .small { fill: #949ba7; }
  .box { fill: #1c1f25; stroke: #4a505b; }
  .trainer { fill: #202a40; stroke: #7aa5ff; }
  .engine { fill: #1b2f24; stroke: #4ade80; }
  .arrow { stroke: #949ba7; }
  .sync { stroke: #7aa5ff; }
}
"""


def box(x: int, y: int, width: int, height: int, lines: Sequence[str], kind: str = "box") -> str:
    """Draw a box with a title and smaller lines below it."""
    parts = [f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>']
    for index, line in enumerate(lines):
        style = "title" if index == 0 else "small"
        at = f'x="{x + width // 2}" y="{y + 24 + 18 * index}"'
        parts.append(f'<text class="{style}" {at} text-anchor="middle">{escape(line)}</text>')
    return "\n".join(parts)


def arrow(path: str, kind: str = "arrow") -> str:
    return f'<path class="{kind}" d="{path}" marker-end="url(#{kind})"/>'


def draw_architecture() -> str:
    """Return the drawing as SVG."""
    parts = [box(20, 16, 860, 92, ("controller: PPO, GRPO, DAPO, DPO, SFT ... one step in plain Python",))]
    width, gap = 128, 14
    for index, step in enumerate(STEPS):
        x = 32 + index * (width + gap)
        parts.append(f'<rect class="box" x="{x}" y="56" width="{width}" height="34" rx="17"/>')
        parts.append(f'<text x="{x + width // 2}" y="78" text-anchor="middle">{escape(step)}</text>')
        if index:
            parts.append(arrow(f"M{x - gap} 73 H{x - 3}"))
    rollout = (
        "rollout: SGLang",
        "multi-turn, tools, environments",
        "tensor and expert parallel",
        "routing, log-probs per token",
    )
    reward = "reward", "functions, code and maths,", "reward models, judges,", "services"
    models = (
        "actor, critic, reference: Megatron-Core",
        "TP, PP, CP, EP, DP, packed sequences",
        "losses [T], routing replay, LoRA, FP8",
        "distributed optimizer, checkpoints",
    )
    parts += [box(20, 150, 260, 92, rollout, "engine"), box(322, 150, 186, 92, reward)]
    parts.append(box(550, 150, 330, 92, models, "trainer"))
    parts += [arrow("M96 90 V146"), arrow("M238 90 V128 H415 V146"), arrow("M380 90 V118 H640 V146")]
    parts.append(arrow("M664 90 V146"))
    parts.append(arrow("M715 242 V282 H150 V246", "sync"))
    middle = 'x="432" y="274" text-anchor="middle"'
    parts.append(
        f"<text {middle}>reshard: Megatron&apos;s shards straight into the engines&apos; shards, version + 1</text>"
    )
    last = 'x="450" y="312" text-anchor="middle"'
    where = (
        "one torchrun or sbatch program, colocated or split, no Ray; on a CPU the same code with gloo and a tiny MoE"
    )
    parts.append(f'<text class="small" {last}>{where}</text>')
    markers = "".join(
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path class="{kind}" d="M0 0 L8 4 L0 8"/></marker>'
        for kind in ("arrow", "sync")
    )
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 326" role="img" aria-label="Architecture of MegaRL">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", f"<defs>{markers}</defs>", *parts, "</svg>"]) + "\n"


# --- pictures of a run


def take_screenshot(run: Path, file: Path) -> None:
    """Save what Chromium shows of the page of a run, at its last rollouts."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise ConfigError(f"the picture of the page needs Chromium; install one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        write_page([load(run)], page)
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/user",
        ]
        command += ["--window-size=1300,940", "--virtual-time-budget=8000", f"--screenshot={file.resolve()}"]
        subprocess.run([*command, f"{page.as_uri()}#Rollouts"], check=True, capture_output=True, timeout=120)


def draw(options: argparse.Namespace) -> int:
    run, folder = load_run(options.run), options.out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "architecture.svg").write_text(draw_architecture(), encoding="utf-8")
    plot([run], folder / "learning_curve.png")
    take_screenshot(options.run, folder / "viewer.png")
    hashes = {picture: hash_sources(picture) for picture in SOURCES}
    (folder / "sources.json").write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")
    print(f"drew {', '.join(SOURCES)} in {folder}")
    return 0


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", metavar="FOLDER")
    return draw(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_cli(main))

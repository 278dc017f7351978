"""Find the recipes of configs/ and the model configs of configs/models/, in a checkout or in an installed package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
# setup.py copies the folder into a wheel's package.
CONFIGS = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
"""The folder configs/."""


def list_recipes() -> dict[str, Path]:
    """Return the recipes' files by name, such as `quickstart`."""
    return {file.stem: file for file in sorted(CONFIGS.glob("*.yaml"))}


def list_model_configs() -> dict[str, Path]:
    """Return the files of models' config.json by name, such as `qwen3-30b-a3b`."""
    return {file.stem.replace("_", "-"): file for file in sorted((CONFIGS / "models").glob("*.json"))}


def find_file(path: str) -> str:
    """Return the path; where there is no such file, that of the shipped file that it names, if any.

    `quickstart`, `quickstart.yaml` and `configs/quickstart.yaml` name a recipe, `configs/models/qwen2.5_7b.json` a
    model's config.
    """
    if not path or Path(path).exists() or Path(path).is_absolute():
        return path
    name = path.removeprefix("configs/")
    shipped = {
        str(file.relative_to(CONFIGS)): file for file in (*list_recipes().values(), *CONFIGS.glob("models/*.json"))
    }
    file = shipped.get(name, shipped.get(f"{name}.yaml"))
    return path if file is None else str(file)

"""Build the documentation site: .venv/bin/python tools/build_docs.py [--serve [PORT]] [--install]

The site is build/site; a warning, such as a dead link or anchor, is an error. --serve shows it on this machine instead
and builds it again whenever a page changes. MkDocs and its plugins (launch/requirements-docs.txt) are in a separate
environment, .venv/docs or $MEGARL_DOCS, installed if it is missing or the list has changed; --install does only that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from megarl.config import ConfigError
from megarl.config.command_line import Parser, int_in_range, run_cli

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = Path(os.environ.get("MEGARL_DOCS", ROOT / ".venv" / "docs"))
REQUIREMENTS = ROOT / "launch" / "requirements-docs.txt"


def install(folder: Path = ENVIRONMENT) -> None:
    """Install the site's packages into an environment of their own, unless it has them.

    Raises ConfigError if pip cannot install them.
    """
    installed = folder / REQUIREMENTS.name
    if installed.is_file() and installed.read_bytes() == REQUIREMENTS.read_bytes():
        return
    venv.create(folder, clear=True, with_pip=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--no-input", "--quiet"]
    if subprocess.run([*pip, "-r", str(REQUIREMENTS)], timeout=600).returncode:
        raise ConfigError(f"pip could not install {REQUIREMENTS.relative_to(ROOT)}; its output is above")
    installed.write_bytes(REQUIREMENTS.read_bytes())


def run() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--serve", type=int_in_range(1, 65535), nargs="?", const=8000, metavar="PORT", help="(8000)")
    parser.add_argument("--install", action="store_true", help="only install the packages")
    options = parser.parse_args()
    install()
    if options.install:
        return 0
    arguments = ["serve", "--dev-addr", f"127.0.0.1:{options.serve}"] if options.serve else ["build", "--strict"]
    command = [str(ENVIRONMENT / "bin/python"), "-m", "mkdocs", *arguments]
    os.chdir(ROOT)
    # Material announces its successor in every build.
    os.execve(command[0], command, dict(os.environ, NO_MKDOCS_2_WARNING="1"))


if __name__ == "__main__":
    sys.exit(run_cli(run))

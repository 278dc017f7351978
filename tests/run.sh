#!/usr/bin/env bash
# Everything that must be green: installs, then ruff, mypy and pytest. Arguments go to pytest: bash tests/run.sh tests/data
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/install.sh
export OMP_NUM_THREADS=1  # ranks and engines share the cores as they are told to, not by thread pools
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python -m pytest -c tests/pytest.ini --rootdir . "${@:-tests}"

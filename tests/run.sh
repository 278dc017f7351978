#!/usr/bin/env bash
# Everything that must be green: installs, then ruff, mypy and pytest. Arguments go to pytest: bash tests/run.sh tests/data
# It ends with a table of what was skipped, and why.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/install.sh
export OMP_NUM_THREADS=1  # ranks and engines share the cores as they are told to, not by thread pools
.venv/bin/ruff check .
.venv/bin/mypy
tests=("${@:-tests}")
pytest() { .venv/bin/python -m pytest -c tests/pytest.ini --rootdir . "$@" "${tests[@]}"; }
said=$(mktemp) beside=$(mktemp)
trap 'rm -f "$said" "$beside"' EXIT
status=0
if (($#)); then
    pytest | tee "$said" || status=$?
    awk -f tests/skips.awk "$said"
    exit "$status"
fi
# Ranks and engines often wait for each other. Tests of one process have the time that they leave, and no more.
(renice -n 19 "$BASHPID" >/dev/null && pytest -m alone) >"$beside" 2>&1 &
other=$!
trap 'kill "$other" 2>/dev/null || true; rm -f "$said" "$beside"' EXIT
pytest -m "not alone" | tee "$said" || status=$?
wait "$other" || status=$?
cat "$beside"
awk -f tests/skips.awk "$said" "$beside"
exit "$status"

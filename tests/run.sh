#!/usr/bin/env bash
# Installs, then runs ruff, mypy and pytest. It ends with a table of what was skipped, and why.
#
#   bash tests/run.sh              what guards correctness: every package, ranks, engines, end to end
#   bash tests/run.sh --fast       single-process tests of a second or less, for whoever has changed a file
#   bash tests/run.sh --nightly    the rest: faults, Slurm, every algorithm by engines, the grid of bad input, pages
#   bash tests/run.sh tests/data   arguments go to pytest: a folder, a file, -k ...
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/install.sh
cores=$(nproc) # before OMP_NUM_THREADS, which nproc heeds
export OMP_NUM_THREADS=1 # ranks and engines share the cores as they are told to, not by thread pools
.venv/bin/ruff check .
.venv/bin/mypy

# Files run side by side, since ranks and engines often wait for each other; on a GPU, which they would share, in turn.
workers=$((cores < 7 ? cores + 1 : 8))
[ ! -e /dev/nvidia0 ] || workers=0
parallel=(-n "$workers" --dist loadfile --no-loadscope-reorder)
case ${1:-} in
"") arguments=(tests -m "not nightly" "${parallel[@]}") ;;
--nightly) arguments=(tests -m nightly "${parallel[@]}") ;;
--fast) arguments=(tests -m "alone and not slow and not nightly" "${parallel[@]}") ;;
*) arguments=("$@") ;;
esac
output=$(mktemp)
trap 'rm -f "$output"' EXIT
status=0
.venv/bin/python -m pytest -c tests/pytest.ini --rootdir . "${arguments[@]}" | tee "$output" || status=$?
awk -f tests/skips.awk "$output"
exit "$status"

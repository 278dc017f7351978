#!/usr/bin/env bash
# Install, then run ruff, mypy and pytest, and print a table of skipped tests with the reasons.
#
#   bash tests/run.sh              tests of correctness: every package, ranks, engines, end to end
#   bash tests/run.sh --fast       single-process tests of at most a second, to run after an edit
#   bash tests/run.sh --nightly    the rest: faults, Slurm, every algorithm with engines, the grid of bad input, pages.
#                                  Of combined features half, and of rehearsed recipes a third, other ones each day; all
#                                  with MEGARL_ALL_CASES=1
#   bash tests/run.sh tests/data   pass arguments to pytest: a folder, a file, -k ...
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
# Tests of vLLM need it, on a CPU. With MEGARL_VLLM=0 they are skipped; --fast has none.
[ "${1:-}" = --fast ] || export MEGARL_VLLM=${MEGARL_VLLM:-auto}
bash launch/install.sh
unset MEGARL_VLLM # tests install, too
cores=$(nproc) # before OMP_NUM_THREADS is set, which nproc obeys
export OMP_NUM_THREADS=1 # ranks and engines share the cores, so thread pools would oversubscribe them
.venv/bin/ruff check .
.venv/bin/mypy

# Run test files in parallel, because ranks and engines often wait for each other; on a GPU, which they would share, run
# them one after another.
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

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
export OMP_NUM_THREADS=1 # ranks and engines share the cores as they are told to, not by thread pools
.venv/bin/ruff check .
.venv/bin/mypy
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
pytest() { .venv/bin/python -m pytest -c tests/pytest.ini --rootdir . "$@"; }

which="not nightly"
case ${1:-} in
--nightly) which="nightly" ;;
--fast)
    status=0
    pytest tests -m "alone and not slow and not nightly" | tee "$results/output" || status=$?
    awk -f tests/skips.awk "$results/output"
    exit "$status"
    ;;
?*)
    status=0
    pytest "$@" | tee "$results/output" || status=$?
    awk -f tests/skips.awk "$results/output"
    exit "$status"
    ;;
esac

part() { pytest tests -m "($2) and $which" -o cache_dir="$results/$1" "${@:3}"; }
# Ranks and engines often wait for each other. Single-process tests take the time that they leave, at the lowest
# priority; then come those that wait for timeouts and for programs to end.
beside() {
    local status=0 other=0
    (renice -n 19 "$BASHPID" >/dev/null && part others alone) || status=$?
    part waiting waits || other=$?
    return $((status > other ? status : other))
}
beside >"$results/beside" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null || true; rm -rf "$results"' EXIT
status=0
part ranks "not alone and not waits" | tee "$results/output" || status=$?
other=0
wait "$beside" || other=$?
status=$((status > other ? status : other)) # 1: tests failed; above that one part has not come to its end
cat "$results/beside"
awk -f tests/skips.awk "$results/output" "$results/beside"
# A few tests that failed are run once more, with nothing beside them. They must pass then, and are named.
if ((status == 1)); then
    failed=$(cat "$results"/*/v/cache/lastfailed | grep '": true' | sort -u)
    echo "failed, and run once more by themselves:"$'\n'"$failed"
    if (($(wc -l <<<"$failed") <= 5)); then
        status=0
        for lane in ranks others waiting; do
            [ ! -f "$results/$lane/v/cache/lastfailed" ] || part "$lane" "alone or not alone" --last-failed --last-failed-no-failures=none || (($? == 5)) || status=1
        done
        ((status)) || echo "passed only when run once more, which is worth a look:"$'\n'"$failed"
    fi
fi
exit "$status"

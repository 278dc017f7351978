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
kept=$(mktemp -d)
trap 'rm -rf "$kept"' EXIT
status=0
if (($#)); then
    pytest | tee "$kept/said" || status=$?
    awk -f tests/skips.awk "$kept/said"
    exit "$status"
fi
part() { pytest -m "$2" -o cache_dir="$kept/$1" "${@:3}"; }
# Ranks and engines often wait for each other. Tests of one process have the time that they leave, and no more; then
# come those that wait for limits of time and for the end of programs.
beside() {
    local status=0 other=0
    (renice -n 19 "$BASHPID" >/dev/null && part others alone) || status=$?
    part waiting waits || other=$?
    return $((status > other ? status : other))
}
beside >"$kept/beside" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null || true; rm -rf "$kept"' EXIT
part ranks "not alone and not waits" | tee "$kept/said" || status=$?
other=0
wait "$beside" || other=$?
status=$((status > other ? status : other)) # 1: tests failed; above that one part has not come to its end
cat "$kept/beside"
awk -f tests/skips.awk "$kept/said" "$kept/beside"
# One that waits for processes may lose a race on a machine that others share. A few that failed are run once more, with
# nothing beside them; they must pass then, and are named.
if ((status == 1)); then
    failed=$(cat "$kept"/*/v/cache/lastfailed | grep '": true' | sort -u)
    echo "failed, and run once more by themselves:"$'\n'"$failed"
    if (($(wc -l <<<"$failed") <= 5)); then
        status=0
        for which in ranks others waiting; do
            [ ! -f "$kept/$which/v/cache/lastfailed" ] || part "$which" "alone or not alone" --last-failed --last-failed-no-failures=none || (($? == 5)) || status=1
        done
        ((status)) || echo "passed only when run once more, which is worth a look:"$'\n'"$failed"
    fi
fi
exit "$status"

# Print a table of skipped tests from the lines of pytest's `-ra`, such as SKIPPED [3] tests/a/test_b.py:12: the reason
/^SKIPPED \[[0-9]+\] / {
    count = substr($2, 2) + 0
    place = $3
    sub(/:[0-9]*:?$/, "", place)
    reason = $0
    sub(/^SKIPPED \[[0-9]+\] [^ ]+ /, "", reason)
    if (!(reason in counts)) order[++reasons] = reason
    counts[reason] += count
    total += count
    if (!((reason, place) in seen)) {
        seen[reason, place] = 1
        places[reason] = places[reason] (places[reason] ? " " : "") place
    }
}
END {
    if (!total) print "skipped: nothing"
    else printf "skipped: %d\n", total
    for (i = 1; i <= reasons; i++) printf "  %4d  %s (%s)\n", counts[order[i]], order[i], places[order[i]]
}

# Sourced by the launchers beside it.

# One line, and the exit code of a mistake.
complain() {
    echo "scripts/launch/$(basename "$0"): error: $1" >&2
    exit 2
}

# Whether something listens at HOST PORT.
listens() {
    timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2" 2> /dev/null
}

# Runs a launcher and ends with the exit code of kvpath, of which torchrun makes 1. A scheduler's signals reach the
# launcher and what it has started, in a process group of its own; all of that has ended when this returns.
# EXIT_CODES is then a file with a line "started" for each rank of this machine, and its exit code if it was not killed.
launch() {
    local code=0 name
    EXIT_CODES=$(mktemp)
    trap 'rm -f "$EXIT_CODES"' EXIT
    export KVPATH_EXIT_CODES=$EXIT_CODES
    set -m
    "$@" &
    local child=$!
    set +m
    for name in TERM INT HUP USR1; do
        # shellcheck disable=SC2064
        trap "kill -$name -- -$child 2> /dev/null || true" "$name"
    done
    wait "$child" || code=$?
    while kill -0 "$child" 2> /dev/null; do # a signal ends a wait
        code=0
        wait "$child" || code=$?
    done
    while kill -0 -- "-$child" 2> /dev/null; do sleep 0.2; done
    if [[ $code -ne 0 ]]; then
        code=$(grep -m1 -x 75 "$EXIT_CODES" || grep -m1 -x '[1-9][0-9]*' "$EXIT_CODES" || echo "$code")
    fi
    return "$code"
}

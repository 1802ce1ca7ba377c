#!/usr/bin/env bash
# Runs what is too long for every change, for a night: all tests with those of KVX_NIGHTLY=1, the
# soak at its full size, and the simulation on seeds that no night before has had. Every part runs,
# whatever becomes of the others. At the end stands what failed, and then the exit status is 1.
#
#   bash tests/nightly.sh [FOLDER]    logs and figures go there; build/nightly/DATE unless told
#
# For a small one:
#   KVX_NIGHT_TESTS       arguments of pytest: which tests (all but the soak)
#   KVX_NIGHT_REQUESTS    of the soak (1000)
#   KVX_NIGHT_SERVERS     of the simulation: one, or all (all)
#   KVX_NIGHT_SEEDS       seeds for each of them (50)
#   KVX_NIGHT_FIRST       the first seed (follows from the date)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"
kvx_setup test
cd "$KVX_ROOT"

FOLDER="${1:-build/nightly/$(date +%F)}"
REQUESTS="${KVX_NIGHT_REQUESTS:-1000}"
SEEDS="${KVX_NIGHT_SEEDS:-50}"
# The days since 1970, so that the next night begins where this one ends.
FIRST="${KVX_NIGHT_FIRST:-$(($(date +%s) / 86400 * SEEDS))}"
read -ra TESTS <<<"${KVX_NIGHT_TESTS:-tests --ignore=tests/soak}"
mkdir -p "$FOLDER"
FOLDER="$(cd "$FOLDER" && pwd)"
export KVX_NIGHTLY=1
FAILED=()

# Runs the part $1, the command after it; its output goes to a log.
part() {
    local name="$1" log="$FOLDER/$1.log" begin="$SECONDS" said="passed"
    shift
    echo "== $name: ${log#"$KVX_ROOT"/}"
    "$@" >"$log" 2>&1 || { said="FAILED"; FAILED+=("$name"); }
    echo "   $said after $((SECONDS - begin)) s"
}

tests() {
    KVX_SIM_TURNS="${KVX_SIM_TURNS:-1000}" KVX_TURNS="${KVX_TURNS:-300}" \
        bash tests/run.sh "${TESTS[@]}"
}

soak() {
    KVX_SOAK_REQUESTS="$REQUESTS" KVX_SOAK_OUTPUT="$FOLDER/soak.json" \
        bash tests/run.sh -n 0 tests/soak
}

fuzz() (
    cd tests && "$KVX_PYTHON" -m simulation.fuzz "${KVX_NIGHT_SERVERS:-all}" "$SEEDS" "$FIRST" \
        "$FOLDER/fuzz.json"
)

# What a log has of failures: tests and seeds by name, or its end where it names none.
failures() {
    # fuzz writes its progress over itself.
    tr '\r' '\n' <"$1" | grep -E '^(FAILED|ERROR) |, seed [0-9]+: ' || tail -n 20 "$1"
}

part tests tests
part soak soak
part fuzz fuzz

[ "${#FAILED[@]}" = 0 ] && exit 0
for name in "${FAILED[@]}"; do
    echo "== $name FAILED"
    failures "$FOLDER/$name.log"
done
exit 1

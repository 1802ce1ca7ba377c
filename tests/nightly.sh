#!/usr/bin/env bash
# Runs what is too long for every change, for a night: all tests with those of --nightly, the
# soak at its full size, and the simulation on seeds that no night before has had. Every part runs,
# whatever becomes of the others. At the end stands what failed, and then the exit status is 1.
#
#   bash tests/nightly.sh [OPTION VALUE]... [FOLDER] [-- ARGUMENTS]
#
#   FOLDER       for logs and figures; build/nightly/DATE unless told
#   ARGUMENTS    of pytest: which tests (all but the soak)
#   --requests   of the soak (1000)
#   --servers    of the simulation: one, or all (all)
#   --seeds      for each of them (50)
#   --first      the first seed (follows from the date)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"
kvx_setup test
# Hands KV over from one engine to another; without it tests/engine/test_disaggregated.py and
# test_handed_over.py are skipped.
kvx_has nixl "" || kvx_install nixl
cd "$kvx_root"

folder="" requests=1000 servers=all seeds=50 first=""
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case "$1" in
    --requests | --servers | --seeds | --first)
        printf -v "${1#--}" %s "${2:?a value for $1}"
        shift 2
        ;;
    -*) kvx_fail "no option of tests/nightly.sh: $1" ;;
    *)
        folder="$1"
        shift
        ;;
    esac
done
shift $(($# > 0))
tests=("$@")
[ $# -gt 0 ] || tests=(tests --ignore=tests/soak)
folder="${folder:-build/nightly/$(date +%F)}"
# The days since 1970, so that the next night begins where this one ends.
first="${first:-$(($(date +%s) / 86400 * seeds))}"
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
failed=()

# Runs the part $1, the command after it; its output goes to a log.
part() {
    local name="$1" log="$folder/$1.log" begin="$SECONDS" said="passed"
    shift
    echo "== $name: ${log#"$kvx_root"/}"
    "$@" >"$log" 2>&1 || { said="FAILED"; failed+=("$name"); }
    echo "   $said after $((SECONDS - begin)) s"
}

tests() {
    bash tests/run.sh --nightly "${tests[@]}"
}

soak() {
    bash tests/run.sh -n 0 --nightly --requests "$requests" \
        --soak-output "$folder/soak.json" tests/soak
}

fuzz() (
    cd tests && "$kvx_python" -m simulation.fuzz "$servers" "$seeds" "$first" "$folder/fuzz.json"
)

# What a log has of failures: tests and seeds by name, or its end where it names none.
failures() {
    # fuzz writes its progress over itself.
    tr '\r' '\n' <"$1" | grep -E '^(FAILED|ERROR) |, seed [0-9]+: ' || tail -n 20 "$1"
}

part tests tests
part soak soak
part fuzz fuzz

[ "${#failed[@]}" = 0 ] && exit 0
for name in "${failed[@]}"; do
    echo "== $name FAILED"
    failures "$folder/$name.log"
done
exit 1

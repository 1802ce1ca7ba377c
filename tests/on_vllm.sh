#!/usr/bin/env bash
# Runs tests with the Python of another vLLM release over the CPU build in .venv, in an environment
# of its own that deploy/lay_over.py makes on the first run: a download of about 340 MB.
#
#   bash tests/on_vllm.sh 0.33.0                                   what is likely to break
#   bash tests/on_vllm.sh 0.33.0 tests/engine/test_speed_cache.py  arguments go to pytest
set -euo pipefail
VERSION="${1:?usage: bash tests/on_vllm.sh VERSION [arguments of pytest]}"
shift
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"
kvx_setup test
cd "$kvx_root"

# The methods and routes that we depend on, kernels that the CPU mode stands in for, our schedulers
# over random traffic, what is refused, and engines for each way into vLLM: prefix cache,
# preemption, passes, sidecars, warm-up, and stock alone. What differs between our policies alone
# runs on .venv's vLLM. Long files first.
ENGINES=tests/engine
RANGES="$ENGINES/test_compiled_ranges.py"
SMOKE=(
    "$RANGES::test_parity"
    "$RANGES::test_from_the_cache_of_an_earlier_start"
    "$RANGES::test_segments_where_there_are_no_compiled_ranges"
    "$RANGES::test_ranges"
    tests/test_vllm_signatures.py
    tests/test_quick_kernels.py
    tests/cache
    "tests/simulation/test_simulation.py::test_all_read_what_they_should[fastkv]"
    "tests/simulation/test_simulation.py::test_all_read_what_they_should[speed]"
    "tests/simulation/test_simulation.py::test_all_read_what_they_should[pyramid]"
    tests/models/test_adapters.py
    tests/server/test_misplaced.py
    tests/server/test_media.py
    tests/server/test_rendering.py
    tests/server/test_*refusals.py
    tests/server/test_start_settings.py
    "$ENGINES/test_speed_cache.py::test_preempted_equals_uninterrupted[mixed]"
    "$ENGINES/test_speed_cache.py::test_prefix_hit_equals_cold"
    "$ENGINES/test_fastkv_parity.py::test_layers_and_rates"
    "$ENGINES/test_fier_cache.py::test_prefixes"
    "$ENGINES/test_full_is_stock.py::test_server_of_full_alone_is_stock"
    "$ENGINES/test_skipped_layers.py::test_preempted"
    "$ENGINES/test_int8_cache.py::test_preempted_with_layers_that_skip"
    "$ENGINES/test_prefill_cadence.py"
    "$ENGINES/test_warm_up.py"
)

"$kvx_python" deploy/lay_over.py "$VERSION" ".venv-$VERSION" || kvx_fail \
    "vLLM $VERSION was not laid over, and no test ran on it; the reason is above."
[ $# -gt 0 ] || set -- "${SMOKE[@]}"
exec ".venv-$VERSION/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"

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
cd "$KVX_ROOT"

# Methods that we depend on, then one engine or two for each way into vLLM: the scheduler's, that
# of the block managers, the model state's and the worker's.
SMOKE=(
    tests/test_seams.py
    tests/cache
    tests/server/test_plugin.py
    tests/server/test_refusals.py
)

"$KVX_PYTHON" deploy/lay_over.py "$VERSION" ".venv-$VERSION" || kvx_fail \
    "vLLM $VERSION was not laid over, and no test ran on it; the reason is above."
[ $# -gt 0 ] || set -- "${SMOKE[@]}"
exec ".venv-$VERSION/bin/python" -m pytest -n 2 --dist loadfile "$@"

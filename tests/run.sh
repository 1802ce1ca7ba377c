#!/usr/bin/env bash
# Runs the tests on CPU; arguments go to pytest. Needs Python 3.11 or later; makes .venv on the
# first run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"
kvx_setup test
cd "$KVX_ROOT"
exec "$KVX_PYTHON" -m pytest "$@"

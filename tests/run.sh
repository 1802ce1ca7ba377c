#!/usr/bin/env bash
# Runs the tests on CPU; arguments go to pytest. Needs Python 3.11 or later; makes .venv on the
# first run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"
kvx_setup test
cd "$kvx_root"
# Two processes share two cores, and tiny matrices gain nothing from threads.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A file runs in one process, which keeps what its tests share; -n 0 runs all in this one. Long
# files are first, see conftest.py.
exec "$kvx_python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"

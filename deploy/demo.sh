#!/usr/bin/env bash
# Serves a small checkpoint with a KV policy on CPU, asks it a long question, and shows what the
# policy saved. Needs Python 3.11 or later; makes .venv on the first run. Options: --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
kvx_setup
cd "$kvx_root"
# In place of this shell, so that whatever stops it reaches the demo, which stops the server.
exec "$kvx_python" -m deploy.demo "$@"

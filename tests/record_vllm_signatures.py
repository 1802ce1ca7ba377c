"""Writes the methods of the installed vLLM into vllm_kvx/compat/vllm_signatures.json, by release.

    KVX_CPU=1 .venv/bin/python tests/record_vllm_signatures.py

Run it with every supported release, where vllm-kvx replaces or calls other methods than before:
``tests/on_vllm.sh`` makes an environment of each.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_kvx.compat import vllm_signatures as seams


def recorded(table: seams.Table, found: Sequence[seams.Seam], line: str) -> dict[str, Any]:
    """`table` with these seams as those of the release `line`, and only of supported ones."""
    lines = [each for each in seams.SUPPORTED_VLLM if each != line]
    new: dict[str, Any] = {}
    for owner, names in table.items():
        for name, known in names.items():
            for text, by in known.items():
                if still := [each for each in by if each in lines]:
                    new.setdefault(owner, {}).setdefault(name, {})[text] = still
    for seam in found:
        if seam.now is not None:
            known = new.setdefault(seam.owner, {}).setdefault(seam.name, {})
            known[seam.now] = sorted({*known.get(seam.now, ()), line})
    return new


def oldest_first(known: Mapping[str, list[str]]) -> str:
    return json.dumps(dict(sorted(known.items(), key=lambda item: item[1])))


def write(table: Mapping[str, Any]) -> None:
    owners = []
    for owner, names in sorted(table.items()):
        lines = [f"  {json.dumps(name)}: {oldest_first(by)}" for name, by in sorted(names.items())]
        owners.append(f" {json.dumps(owner)}: {{\n" + ",\n".join(lines) + "\n }")
    seams.TABLE.write_text("{\n" + ",\n".join(owners) + "\n}\n", encoding="utf-8")


def main() -> int:
    version, supported = seams.vllm_version(), seams.SUPPORTED_VLLM
    line = seams.release_line(version)
    if line not in supported:
        print(f"error: found vLLM {version}; add {line} to SUPPORTED_VLLM first", file=sys.stderr)
        return 2
    found = seams.all_seams()
    write(recorded(seams.read_table(), found, line))
    print(f"{seams.TABLE.name}: {len(found)} methods of vLLM {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

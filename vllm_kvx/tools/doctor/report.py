"""How findings are shown: as text, or as one JSON object."""

import json
from collections.abc import Mapping, Sequence

from vllm_kvx.tools.doctor.findings import Finding, Request

_MARKS = {"ok": "  ok      ", "note": "  note    ", "problem": "  PROBLEM "}
_INDENT = " " * len(_MARKS["ok"])

Found = Mapping[str, Sequence[Finding]]


def section(name: str, findings: Sequence[Finding]) -> str:
    """A section's lines: its name, then each finding, and beneath it what mends it."""
    lines = [name]
    for finding in findings:
        says = finding.says.splitlines() or [""]
        lines.append(_MARKS[finding.status] + says[0])
        lines += [_INDENT + line for line in says[1:]]
        if finding.mend and finding.mend not in finding.says:
            lines.append(f"{_INDENT}-> {finding.mend}")
    return "\n".join(lines)


def verdict(found: Found, request: Request) -> str:
    """The report's last line: whether such a server would start."""
    problems = sum(finding.status == "problem" for each in found.values() for finding in each)
    if problems:
        return f"{problems} problem{'s' if problems > 1 else ''}: see the lines marked PROBLEM"
    if request.model is None:
        return "nothing is broken; name a MODEL to see whether a server of it would start"
    return "nothing is broken: such a server would start"


def as_json(version: str, found: Found) -> str:
    """The report as a JSON text: the version, `ok` as a whole, and the findings by section."""
    sections = {name: [finding._asdict() for finding in each] for name, each in found.items()}
    whole = {"version": version, "ok": exit_code(found) == 0, "sections": sections}
    return json.dumps(whole, indent=2)


def exit_code(found: Found) -> int:
    """The command's exit code: 1 if any finding is a problem, else 0."""
    return int(any(finding.status == "problem" for each in found.values() for finding in each))

"""Doctor's sections, run in this process: what a child of it does, without the pipe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models import LOOKUP

from vllm_kvx.tools.doctor import child
from vllm_kvx.tools.doctor.findings import Context, Finding, Request
from vllm_kvx.tools.doctor.sections import SECTIONS


class Doctor:
    """Runs sections of one request, in the order that they are asked for."""

    def __init__(self, **request: Any) -> None:
        self.context = Context(Request(**request))

    def __call__(self, *names: str) -> list[Finding]:
        """What the last of the sections `names` finds."""
        found: list[Finding] = []
        for name in names:
            (section,) = [each for each in SECTIONS if each.name == name]
            found = list(child.findings(section, self.context))
        return found

    def problems(self, *names: str) -> list[Finding]:
        """The problems among them."""
        return [each for each in self(*names) if each.status == "problem"]


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Doctor]:
    """doctor(policy, model=..., ...): of the demo checkpoint, with an empty cache folder."""
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))

    def make(policy: str | None = None, model: Path | str | None = LOOKUP, **more: Any) -> Doctor:
        return Doctor(policy=policy, model=None if model is None else str(model), **more)

    return make

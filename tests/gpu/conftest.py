"""Engines in this process, and float32 that is float32."""

import os

import pytest

# Triton multiplies float32 in TF32 unless told otherwise, three digits short of exact.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

from world.engine import keep_in_process


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_in_process(monkeypatch)

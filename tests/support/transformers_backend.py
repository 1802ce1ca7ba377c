"""vLLM's Transformers backend in a process that also runs transformers' own models."""

import pytest


def keep_transformers_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test's end, the backend does not prepare transformers' classes for compilation.

    It changes the class of the decoder itself, and transformers could not make another one in this
    process. Without compilation (`enforce_eager`) an engine does not need it.
    """
    from vllm.model_executor.models.transformers.base import Base

    monkeypatch.setattr(Base, "_decorate_for_torch_compile", lambda self: None)

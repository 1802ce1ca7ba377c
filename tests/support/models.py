"""Models on disk: tiny random ones, and the trained checkpoint of the repository."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from reference.models import build_model

from support.prompts import VOCAB

TESTS = Path(__file__).resolve().parents[1]
# A Llama of 8 layers that answers questions about its prompt: see benchmarks/checkpoint.
LOOKUP = TESTS / "checkpoints" / "lookup-8l"


class TinyModels:
    """Builds tiny random models, each once; they lie where `new_dir` says."""

    def __init__(self, new_dir: Callable[[str], Path]) -> None:
        self._new_dir = new_dir
        self._made: dict[str, Path] = {}

    def __call__(self, arch: str = "llama", **options: Any) -> Path:
        """The directory of a model; options are those of ``reference.models.build_model``."""
        key = f"{arch}-{sorted(options.items())}"
        if key not in self._made:
            built: Any = build_model(self._new_dir(arch), arch=arch, vocab=VOCAB, **options)  # type: ignore[arg-type]
            self._made[key] = built
        return self._made[key]

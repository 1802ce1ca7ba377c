"""Prompts with images for tiny models, and whether engines answer them as the references do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from reference import masked
from reference.pictures import picture, seeing
from reference.wrappers import PART, TEXT_VOCAB, image_tokens

from support.engine import Answer, Engine, running
from support.expected import Policy, load, named
from support.parity import assert_parity, room_for
from support.prompts import prompts_of


class Shown(NamedTuple):
    """A prompt and its images: rows and columns of parts, and the seed of the pixels."""

    prompt: list[int]
    images: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, model: str, *pieces: int | tuple[int, int, int], seed: int = 0) -> "Shown":
        """Random texts of so many tokens, and images between them, for a model by its type."""
        tokens: list[int] = []
        for index, piece in enumerate(pieces):
            if isinstance(piece, int):
                tokens += words(piece, 100 * seed + index)
            else:
                tokens += image_tokens(model)
        return cls(tokens, tuple(piece for piece in pieces if not isinstance(piece, int)))

    def pixels(self) -> list[Any]:
        """The images, as an engine takes them."""
        return [pixels(*image) for image in self.images]


def words(count: int, seed: int) -> list[int]:
    """Random tokens of a text, none of which stands for images."""
    (tokens,) = prompts_of((count,), seed)
    return [3 + (token - 3) % (TEXT_VOCAB - 3) for token in tokens]


def pixels(rows: int, columns: int, seed: int) -> Any:
    """An image of which the encoder makes rows x columns tokens."""
    shape = rows * PART, columns * PART, 3
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def ask(
    engine: Engine,
    shown: Sequence[Shown],
    policies: Sequence[Policy],
    max_tokens: int,
    **options: Any,
) -> list[Answer]:
    """Each prompt's answer under its policy, given to the engine at once."""
    return engine.generate(
        [each.prompt for each in shown],
        max_tokens,
        [named(policy) for policy in policies],
        images=[each.pixels() for each in shown],
        **options,
    )


def assert_parity_shown(
    path: Path,
    shown: Sequence[Shown],
    answers: Sequence[Answer],
    policies: Sequence[Policy],
    **options: Any,
) -> None:
    """As `assert_parity`, of answers to prompts with images; one in ten may be a near-tie."""
    model, differed = load(path), 0
    for each, answer, policy in zip(shown, answers, policies, strict=True):
        seen = None
        if each.images:
            layers = masked.layers_of(model)
            seen = picture(model, layers, path, answer.prompt, each.pixels())
        with seeing(seen):
            differed += assert_parity(model, [answer], policy, most=1, least=0, **options)
    assert differed <= len(answers) // 10, f"{differed} near-ties among {len(answers)} prompts"


@contextmanager
def serving(model: Path, policies: list[Policy], **options: Any) -> Iterator[Engine]:
    """An engine that keeps its encoder, and cuts images in chunks of at most 40 tokens."""
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": False,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "long_prefill_token_threshold": 40,
        "enable_prefix_caching": True,
        "limit_mm_per_prompt": {"image": 2, "video": 0},
    }
    if "mistral3" in str(model):
        defaults["limit_mm_per_prompt"] = {"image": 2}
    with running(model, "full", config=room_for(policies), **defaults | options) as engine:
        yield engine

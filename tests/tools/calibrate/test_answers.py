"""Calibration by answers: what layers propagate, and what stays of answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import ARCHS, build_model
from support.prompts import prompt_of
from transformers import AutoModelForCausalLM

from vllm_kvx.errors import ToolError
from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.tools.calibrate import by_answers
from vllm_kvx.tools.checkpoint.answers import (
    Choice,
    Chooser,
    Question,
    Seen,
    answers_kept,
    choices_of,
    generate,
    look,
    mass_above,
    mean_scores,
    share_of_evidence,
    share_of_mass,
)
from vllm_kvx.tools.checkpoint.dense_decoder import Cache, DenseDecoder

LAYERS = 5
FAST = FastKV(tsp_rate=0.3, window=4, kernel=5)
STRUCT = StructKV(struct_rate=0.3, window=4, decay=0.7)
PROMPT = prompt_of(60)
ANSWER = prompt_of(5, seed=9)
SUM, MAX = choices_of([0.3])


def nothing(_: int) -> None:
    """No progress."""


@pytest.fixture(scope="module", params=ARCHS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return build_model(folder, arch=request.param, layers=LAYERS)


@pytest.fixture(scope="module")
def decoder(path: Path) -> DenseDecoder:
    return DenseDecoder.load(str(path), "cpu", dtype="float32")


@torch.no_grad()
def masked(path: Path, tokens: Sequence[int], hidden: Sequence[int], layer: int) -> tuple[Any, Any]:
    """Logits and attention (L, H, n, n) of transformers where rows are hidden above a layer."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    total = len(tokens)
    states = model.model.embed_tokens(torch.tensor([list(tokens)]))
    rotary = model.model.rotary_emb(states, torch.arange(total)[None])
    maps = []
    for index, block in enumerate(model.model.layers):
        mask = torch.full((total, total), float("-inf")).triu(1)
        if index > layer:
            mask[:, list(hidden)] = float("-inf")
            mask.fill_diagonal_(0)
        _, attention = block.self_attn(
            block.input_layernorm(states),
            position_embeddings=rotary,
            attention_mask=mask[None, None],
        )
        maps.append(attention[0])
        out = block(states, attention_mask=mask[None, None], position_embeddings=rotary)
        states = out[0] if isinstance(out, tuple) else out
    return model.lm_head(model.model.norm(states))[0], torch.stack(maps)


def test_generated_tokens_are_the_models(path: Path, decoder: DenseDecoder) -> None:
    """At once or one by one, their logits and what they attend to are those of one forward pass."""
    logits, attention = masked(path, PROMPT + ANSWER, (), LAYERS)
    for pieces in ([ANSWER], [[token] for token in ANSWER]):
        cache, done, total = Cache(), len(PROMPT), torch.zeros(LAYERS, len(PROMPT))
        for _ in decoder.layers(decoder.embed(PROMPT), cache=cache):
            pass
        for piece in pieces:
            mine, masses = decoder.extend(piece, done, cache)
            expected = logits[done : done + len(piece)]
            torch.testing.assert_close(mine, expected, atol=1e-3, rtol=1e-3)
            assert all(len(mass) == done for mass in masses)
            total += torch.stack([mass[: len(PROMPT)] for mass in masses])
            done += len(piece)
        expected = attention[:, :, len(PROMPT) :, : len(PROMPT)].sum(dim=(1, 2))
        torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-3)


def test_an_answer_is_greedy_and_ends(path: Path, decoder: DenseDecoder) -> None:
    tokens = list(PROMPT)
    for _ in range(4):
        logits, _ = masked(path, tokens, (), LAYERS)
        tokens.append(int(logits[-1].argmax()))
    expected = tokens[len(PROMPT) :]

    def answer(**options: Any) -> list[int]:
        cache = Cache()
        rows = decoder.embed(PROMPT)
        for output, _ in decoder.layers(rows, cache=cache):
            rows = output
        question = Question(tuple(PROMPT), **{"limit": 4, **options})
        return generate(decoder, rows.hidden[-1:], question, cache)[0]

    assert answer() == expected and answer(limit=2) == expected[:2]
    # Once it is right, nothing more is said.
    right = answer(score=lambda said: float(said[-1] == expected[1]), evidence=(1,))
    assert right == expected[: expected.index(expected[1]) + 1]


@pytest.mark.parametrize("policy", [FAST, STRUCT], ids=str)
@pytest.mark.parametrize("layer", [0, 2, LAYERS - 2])
def test_answers_under_a_policy(path: Path, decoder: DenseDecoder, policy: Any, layer: int) -> None:
    """The tokens that are predicted are those of a pass whose upper layers see less."""
    question = Question(tuple(PROMPT), limit=len(ANSWER))
    seen = look(decoder, question, policy, [SUM, MAX, Choice(0.5, "sum")], nothing)
    assert len(seen.answer) <= len(ANSWER) and seen.right == 1
    chosen = seen.chosen[SUM][layer].tolist()
    assert len(chosen) == 18 and chosen == sorted(chosen) and chosen[-4:] == [56, 57, 58, 59]
    hidden = sorted(set(range(len(PROMPT))) - set(chosen))
    logits, _ = masked(path, [*PROMPT, *seen.answer], hidden, layer)
    predicted = logits[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist()
    same = sum(a == b for a, b in zip(predicted, seen.answer, strict=True))
    assert answers_kept(decoder, question, seen, layer, SUM) == (same, len(seen.answer))
    # A higher rate chooses these and more.
    assert set(chosen) < set(seen.chosen[Choice(0.5, "sum")][layer].tolist())
    assert len(seen.chosen[Choice(0.5, "sum")][layer]) == 30


def test_rows_that_each_layer_would_propagate(decoder: DenseDecoder) -> None:
    attentions = [a for _, a in decoder.layers(decoder.embed(PROMPT), window=4)]
    outside = len(PROMPT) - 4
    fast, struct = (Chooser(policy, len(PROMPT), [SUM, MAX]) for policy in (FAST, STRUCT))
    centrality = torch.zeros(outside)
    for attention in attentions:
        assert attention is not None
        weights = attention[..., :outside]
        centrality = 0.7 * centrality + weights.sum(dim=(0, 1))
        best = centrality.topk(14).indices.sort().values.tolist()
        assert struct(attention)[SUM].tolist() == [*best, 56, 57, 58, 59]
        pooled = [weights[..., max(key - 2, 0) : key + 3].amax().item() for key in range(outside)]
        chosen = fast(attention)[MAX].tolist()[:-4]
        left = set(range(outside)) - set(chosen)
        assert min(pooled[key] for key in chosen) >= max(pooled[key] for key in left)


def test_share_of_evidence() -> None:
    chosen = torch.tensor([1, 4, 5, 9])
    assert share_of_evidence(chosen, torch.tensor([4, 5])) == 1
    assert share_of_evidence(chosen, torch.tensor([3, 4, 5, 6])) == 0.5
    assert share_of_evidence(chosen, torch.tensor([0])) == 0


def test_attention_of_the_layers_above() -> None:
    masses = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert mass_above(masses).tolist() == [[8, 10], [5, 6]]
    # Token 0 and the window, the last two, do not count; the best two others get 9.
    mass = torch.tensor([100.0, 4.0, 1.0, 5.0, 0.0, 50.0, 60.0])
    for chosen, share in (([1, 3], 1), ([0, 3], 5 / 9), ([2, 4], 1 / 9), ([0, 4], 0)):
        rows = torch.tensor([*chosen, 5, 6])
        assert share_of_mass(mass, rows, 2) == pytest.approx(share)
    assert share_of_mass(torch.zeros(7), torch.tensor([1, 3, 5, 6]), 2) == 1


def test_scores_that_are_not_finite() -> None:
    with pytest.raises(ToolError, match="use --dtype bfloat16 or float32"):
        mean_scores([Seen({}, {SUM: [0.5, float("nan")]}, (1,), 1)])


@pytest.mark.parametrize(
    ("right", "expected", "asked"),
    [
        ({"a": [0, 0, 0, 1, 0, 0], "b": []}, "a", "aaaaaa"),
        ({"a": [0, 0, 0, 0, 1, 1], "b": [0, 0, 0, 0, 0, 0]}, "b", "aaaabbbbbb"),
    ],
)
def test_who_answers_nothing_is_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch, right: dict[str, list[int]], expected: str, asked: str
) -> None:
    looked = []

    def fake(_: Any, question: Question, *__: Any) -> Seen:
        family, number = question.token_ids
        looked.append(family)
        return Seen({}, {}, (1,), right[family][number])  # type: ignore[index]

    def make(family: str) -> list[Question]:
        return [Question((family, number)) for number in range(6)]  # type: ignore[arg-type]

    monkeypatch.setattr(by_answers, "look", fake)
    decoder: Any = type("Decoder", (), {"num_layers": 2})
    family, found = by_answers.ask(decoder, ("a", "b"), make, FAST, [SUM])
    assert family == expected and len(found.seen) == 6 and "".join(looked) == asked

"""Calibration by answers: what layers propagate, what stays of answers, and the choice."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import ARCHS, build_model
from safetensors.torch import load_file, save_file
from support.models import LOOKUP
from support.prompts import prompt_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.checkpoint.prompts import make_prompt
from vllm_kvx.cli import main
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.records.model_key import ModelIdentity
from vllm_kvx.server.measured_layers import layer_of
from vllm_kvx.tools.calibrate import by_answers
from vllm_kvx.tools.checkpoint import questions
from vllm_kvx.tools.checkpoint.answers import (
    Candidate,
    Chooser,
    Question,
    Seen,
    Trial,
    answers_kept,
    candidates,
    generate,
    look,
    mass_above,
    mean_scores,
    prefill_ratio,
    share_of_evidence,
    share_of_mass,
    tolerated_losses,
    try_out,
)
from vllm_kvx.tools.checkpoint.dense_decoder import Cache, DenseDecoder

LAYERS = 5
FAST = FastKV(tsp_rate=0.3, window=4, kernel=5)
STRUCT = StructKV(struct_rate=0.3, window=4, decay=0.7)
PROMPT = prompt_of(60)
ANSWER = prompt_of(5, seed=9)


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


# Tokens over a cache.


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
    seen = look(decoder, question, policy, nothing)
    assert len(seen.answer) <= len(ANSWER) and seen.right == 1
    chosen = seen.chosen["sum"][layer].tolist()
    assert len(chosen) == 18 and chosen == sorted(chosen) and chosen[-4:] == [56, 57, 58, 59]
    hidden = sorted(set(range(len(PROMPT))) - set(chosen))
    logits, _ = masked(path, [*PROMPT, *seen.answer], hidden, layer)
    predicted = logits[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist()
    same = sum(a == b for a, b in zip(predicted, seen.answer, strict=True))
    assert answers_kept(decoder, question, seen, layer, "sum") == (same, len(seen.answer))


def test_rows_that_each_layer_would_propagate(decoder: DenseDecoder) -> None:
    attentions = [a for _, a in decoder.layers(decoder.embed(PROMPT), window=4)]
    outside = len(PROMPT) - 4
    fast, struct = (Chooser(policy, len(PROMPT), ("sum", "max")) for policy in (FAST, STRUCT))
    centrality = torch.zeros(outside)
    for attention in attentions:
        assert attention is not None
        weights = attention[..., :outside]
        centrality = 0.7 * centrality + weights.sum(dim=(0, 1))
        best = centrality.topk(14).indices.sort().values.tolist()
        assert struct(attention)["sum"].tolist() == [*best, 56, 57, 58, 59]
        pooled = [weights[..., max(key - 2, 0) : key + 3].amax().item() for key in range(outside)]
        chosen = fast(attention)["max"].tolist()[:-4]
        left = set(range(outside)) - set(chosen)
        assert min(pooled[key] for key in chosen) >= max(pooled[key] for key in left)


# Scores.


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
        mean_scores([Seen({}, {"sum": [0.5, float("nan")]}, (1,), 1)])


def test_candidates_come_earliest_and_the_papers_first() -> None:
    scores = {"sum": [0.1, 0.98, 1.0, 0.5], "max": [0.99, 0.99, 0.2, 1.0]}
    found = [(c.layer, c.reduction) for c in candidates(scores, ("sum", "max"), 0.98)]
    assert found == [(0, "max"), (1, "sum"), (1, "max"), (2, "sum"), (3, "max")]
    assert [c.layer for c in candidates(scores, ("sum",), 0.99)] == [2]
    assert [c.layer for c in candidates(scores, ("sum",), 0.99, later=True)] == [2, 3]


def test_losses_that_chance_explains() -> None:
    """By hand: of 16 answers at 98% two or more are lost with a chance of 3.7%, one of 27.6%."""
    assert [tolerated_losses(count, 0.98) for count in (1, 2, 3, 8, 16, 24, 50)] == [
        *(0, 0, 1, 1, 1, 2, 3)
    ]
    assert tolerated_losses(10, 1.0) == 0


def test_prefill_by_layers() -> None:
    assert prefill_ratio(16, 28, 0.2) == pytest.approx(1.458, abs=1e-3)
    assert prefill_ratio(19, 28, 0.2) == pytest.approx(1.296, abs=1e-3)
    assert prefill_ratio(6, 7, 0.2) == 1


# The choice.


def answered(right: float, scores: Sequence[float]) -> Seen:
    return Seen({}, {"sum": list(scores), "max": list(scores)}, (1, 2), right)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, float]], list[int]]:
    """Makes each layer keep so many answers of those asked; returns the layers tried so far."""

    def keep(kept: dict[int, float]) -> list[int]:
        tried: list[int] = []

        def fake(_: Any, __: Any, seen: Any, candidate: Candidate, most: float, *___: Any) -> Trial:
            tried.append(candidate.layer)
            asked = sum(one.right for one in seen)
            complete = asked - kept[candidate.layer] <= most
            return Trial(candidate, kept[candidate.layer], asked, complete)

        monkeypatch.setattr(by_answers, "try_out", fake)
        return tried

    return keep


@pytest.mark.parametrize(
    ("kept", "count", "chosen", "tried"),
    [
        ({1: 16, 2: 16, 3: 16}, 16, 1, [1]),
        # One lost of 16 is within chance, two are not.
        ({1: 14, 2: 15, 3: 16}, 16, 2, [1, 2]),
        ({1: 14, 2: 10, 3: 12}, 16, None, [1, 2, 3]),
        # Of many, more than the least stay, and fewer than the target: the best of these.
        ({1: 91, 2: 93, 3: 93}, 100, 2, [1, 2, 3]),
        ({1: 89, 2: 20, 3: 0}, 100, None, [1, 2, 3]),
        # Of few, none may be lost.
        ({1: 7, 2: 8, 3: 8}, 8, 2, [1, 2]),
    ],
)
def test_the_earliest_layer_whose_answers_stay(
    trials: Any, kept: dict[int, float], count: int, chosen: int | None, tried: list[int]
) -> None:
    layers = trials(kept)
    seen = [answered(1, [0.2, 0.99, 1, 1])] * count
    asked = [Question((1,), (0,), lambda _: 1.0)] * count
    outcome = by_answers.choose(None, asked, seen, ("sum",), 0.98, 0.9)  # type: ignore[arg-type]
    assert layers == tried and [t.candidate.layer for t in outcome.trials] == tried
    found = outcome.chosen
    assert (None if found is None else found.candidate.layer) == chosen


def test_too_few_answers_say_nothing(trials: Any) -> None:
    layers = trials({})
    seen = [answered(1, [1.0, 1])] * 7 + [answered(0, [1.0, 1])] * 9
    asked = [Question((1,), (0,), lambda _: 1.0)] * 16
    outcome = by_answers.choose(None, asked, seen, ("sum",), 0.98, 0.9)  # type: ignore[arg-type]
    assert outcome.chosen is None and not layers


def test_a_hopeless_trial_ends(decoder: DenseDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvx.tools.checkpoint import answers

    monkeypatch.setattr(answers, "answers_kept", lambda *_: (0.0, 1.0))
    seen = [answered(right, [1.0]) for right in (1, 0, 1, 1, 1)]
    trial = try_out(decoder, [Question((1,))] * 5, seen, Candidate(0, "sum", 1), 1.5, nothing)
    assert (trial.kept, trial.asked, trial.complete) == (0, 2, False)


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
        return answered(right[family][number], [1.0])  # type: ignore[index]

    def make(family: str) -> list[Question]:
        return [Question((family, number)) for number in range(6)]  # type: ignore[arg-type]

    monkeypatch.setattr(by_answers, "look", fake)
    decoder: Any = type("Decoder", (), {"num_layers": 2})
    family, seen = by_answers.ask(decoder, ("a", "b"), make, FAST)
    assert family == expected and len(seen) == 6 and "".join(looked) == asked


# From end to end, on the checkpoint that answers.


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `calibrate` on a model, with lookups of the one kind that the demo checkpoint answers.

    Returns the code and what it said on stdout and on stderr.
    """
    for module in (questions, by_answers):
        monkeypatch.setattr(module, "FAMILIES", {"notes": ("notes",)})

    def run(model: Path = LOOKUP, *flags: str, **options: Any) -> tuple[int, str, str]:
        argv = ["calibrate", str(model), "--device", "cpu", "--no-plot", *flags]
        for name, value in {"count": 8, "length": 400, **options}.items():
            if value is not None:
                argv += [f"--{name.replace('_', '-')}", str(value)]
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def test_the_demo_checkpoint(command: Callable[..., Any], cache: Path) -> None:
    """Its layers 0 to 3 find the answer, so the third is the earliest that may propagate."""
    code, out, err = command(compare=None)
    assert code == 0 and "prompt 8/8" in err and "answers under layer 3 by sum" in err
    [path] = cache.glob("calibration/*.json")
    record = json.loads(path.read_text())
    facts = {
        **{"method": "fastkv", "criterion": "answers", "layers": 8, "tsp_layer": 3},
        **{"reduction": "sum", "window": 8, "kernel": 7, "tsp_rate": 0.2, "answered": 8},
        **{"target": 0.98, "least": 0.9, "asked": "notes", "paper": {}},
    }
    assert facts.items() <= record.items()
    assert record["scores"]["sum"][3] == 1 and max(record["scores"]["sum"][:3]) < 0.9
    assert len(record["scores"]["max"]) == 7
    trial = {"layer": 3, "reduction": "sum", "score": 1, "kept": 8, "asked": 8}
    assert record["trials"] == [trial]
    [marked] = [line for line in out.splitlines() if "<- tsp_layer" in line]
    assert marked.split()[0] == "3" and "1.67x" in marked
    assert "The full model answers 8 of the 8 lookups." in out
    assert "Answers under layer 3, sum: 8 of 8 stay" in out
    identity = ModelIdentity(str(LOOKUP), AutoConfig.from_pretrained(LOOKUP).to_dict())
    assert layer_of(FastKV(), identity, 8) == (*(3, f"calibrated by answers: {path}", "sum"),)
    for other in (FastKV(tsp_rate=0.3), FastKV(window=4), FastKV(kernel=5)):
        assert layer_of(other, identity, 8) is None


def test_all_criteria_side_by_side(
    command: Callable[..., Any], cache: Path, tmp_path: Path
) -> None:
    code, out, _ = command(LOOKUP, "--compare")
    assert code == 0 and "Eq. 3" in out and "<- the paper's" in out
    code, out, _ = command(method="structkv", count=6)
    assert code == 0 and "Eq. 8" in out and "<- pivot" in out and "<- the paper's" in out
    fast, struct = (json.loads(p.read_text()) for p in sorted(cache.glob("calibration/*.json")))
    assert len(fast["paper"]["values"]) == 7 and 0 <= fast["paper"]["layer"] <= 3
    assert struct["paper"]["values"][0] is None and len(struct["paper"]["values"]) == 8
    assert struct["decay"] == 0.9 and struct["struct_rate"] == 0.2
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from vllm_kvx.tools.calibrate import figures

    for number, record in enumerate((fast, struct)):
        figure = figures.answer_curves(pyplot, record)
        figure.savefig(tmp_path / f"{number}.png")
        count = record["prompts"]["count"]
        assert figure.axes[0].get_title(loc="left").endswith(f"\nn = {count} prompts")


def test_own_prompts(command: Callable[..., Any], cache: Path, tmp_path: Path) -> None:
    """Judged by where the full model's answer looks, and by the tokens that are still predicted."""
    tokenizer = AutoTokenizer.from_pretrained(LOOKUP)
    prompts = [make_prompt(seed, 400, tokenizer, values=2)[0] for seed in range(4)]
    (tmp_path / "prompts.txt").write_text("\n---\n".join(prompts))
    code, out, _ = command(prompts=tmp_path / "prompts.txt", count=None, length=None)
    assert code == 0 and "The full model's own answers to the 4 prompts" in out
    [path] = cache.glob("calibration/*.json")
    record = json.loads(path.read_text())
    assert record["asked"] == "own" and record["prompts"]["tokens"] == [400] * 4
    trial = record["trials"][-1]
    assert trial["kept"] == trial["asked"] >= 8 and record["tsp_layer"] == trial["layer"] == 3
    assert all(trial["layer"] < 3 for trial in record["trials"][:-1])


def test_no_layer_keeps_enough(
    command: Callable[..., Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where next to nothing goes on already above a layer that has not found the answer."""
    monkeypatch.setattr(by_answers, "candidates", lambda *_, **__: [Candidate(1, "sum", 0.5)])
    code, out, err = command(method="structkv", struct_rate=0.03)
    [line] = [line for line in err.splitlines() if "error:" in line]
    assert code == 2 and "no layer keeps enough: under the best that was tried, layer" in line
    assert "90% are the least: use --kv-policy snapkv or fier-1024, or choose a layer" in line
    assert "(pivot=<int>)" in line and "<- pivot" not in out and "evidence" in out
    assert not list(cache.glob("calibration/*"))


def test_a_model_that_answers_nothing(
    command: Callable[..., Any], cache: Path, tmp_path: Path
) -> None:
    model = tmp_path / "random"
    shutil.copytree(LOOKUP, model)
    weights: dict[str, Tensor] = load_file(model / "model.safetensors")
    torch.manual_seed(0)
    weights = {name: torch.randn_like(w) * 0.02 + (w.ndim == 1) for name, w in weights.items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    code, _, err = command(model, count=3)
    [line] = [line for line in err.splitlines() if "error:" in line]
    assert code == 2 and "the full model answers 0 of 3 generated lookups" in line
    assert "--prompts FILE, raise --count, or use --kv-policy snapkv" in line
    assert not list(cache.glob("calibration/*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tsp_rate": 1}, "a rate of 1 drops no token"),
        ({"method": "structkv", "struct_rate": 1}, "a rate of 1 drops no token"),
        ({"length": 8}, "notes: its shortest prompt has"),
        ({"window": 64, "length": 100}, "twice the window, 128, are the least"),
        ({"max_layer": 3}, "--max-layer has no meaning without --criterion paper"),
        ({"weights": "1,0,0"}, "--weights has no meaning without --method structkv"),
        ({"decay": 0.5}, "--decay has no meaning without --method structkv"),
        ({"method": "structkv", "kernel": 5}, "--kernel has no meaning without --method fastkv"),
        ({"prompts": "/nowhere.txt"}, "cannot read prompts"),
    ],
)
def test_what_cannot_be_done(
    command: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    code, _, err = command(**options)
    assert code == 2 and message in err.splitlines()[-1]


def test_a_model_without_a_tokenizer(path: Path, command: Callable[..., Any]) -> None:
    code, _, err = command(path)
    assert code == 2 and "no tokenizer that loads, so no lookups can be generated" in err

"""`vllm-kvx diagnose --method speed`, from end to end, against transformers' own passes."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import speed
from reference.models import build_model
from safetensors.torch import load_file, save_file
from support.models import LOOKUP
from support.nightly import nightly
from support.prompts import VOCAB, prompt_of
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from vllm_kvx.cli import main
from vllm_kvx.tools.diagnose.cutoff_report import smallest, suggested
from vllm_kvx.tools.diagnose.probes import CHAT_QUESTIONS, chat_probes, lookup_probes, own_probes

LAYERS = 5
PROMPTS = [prompt_of(40), prompt_of(55, seed=1), prompt_of(33, seed=2)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return build_model(folder, arch=request.param, layers=LAYERS, vocab=VOCAB)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return build_model(folder, arch="llama", layers=LAYERS, vocab=VOCAB)


@pytest.fixture
def diagnose(tmp_path: Path) -> Callable[..., int]:
    """Runs the command on a model with PROMPTS; options as keywords, None leaves one out."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in PROMPTS))

    def run(model: Path | str, **options: Any) -> int:
        given = {"method": "speed", "prompts": prompts, "device": "cpu", "output": tmp_path / "out"}
        argv = ["diagnose", str(model)]
        for option, value in {**given, **options}.items():
            if value is not None:
                argv += [f"--{option.replace('_', '-')}", str(value)]
        return main(argv)

    return run


def written(tmp_path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((tmp_path / "out" / "diagnosis-speed.json").read_text())
    return record


# The numbers.


@torch.no_grad()
def by_hand(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> dict[str, np.ndarray]:
    """The curves from transformers' own attention and states, token by token."""
    states: list[np.ndarray] = []
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out: states.append((out[0] if isinstance(out, tuple) else out).double())
        )
        for layer in model.model.layers
    ]
    tokens, total = prompt + (answer[:-1] or answer), len(prompt)
    out = model.model(torch.tensor([tokens]), output_attentions=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    curves: dict[str, list[float]] = {
        name: [] for name in ("user", "first", "earlier", "rest", "entropy", "curvature")
    }
    for attention, state in zip(out.attentions, states, strict=True):
        rows = attention[0].double().mean(dim=0).numpy()
        here: dict[str, list[float]] = {name: [] for name in curves}
        for index in range(total, len(tokens)):
            row = rows[index]
            on_user = row[1:total] / row[1:total].sum()
            here["user"].append(row[1:total].sum())
            here["first"].append(row[0])
            here["earlier"].append(row[total:index].sum())
            here["rest"].append(row[index])
            here["entropy"].append(-(on_user * np.log(on_user)).sum())
        steps = np.diff(state.reshape(len(tokens), -1).numpy(), axis=0)
        for before, after in pairwise(steps):
            cosine = before @ after / (np.linalg.norm(before) * np.linalg.norm(after))
            here["curvature"].append(math.degrees(math.acos(cosine)))
        for name, values in here.items():
            curves[name].append(float(np.mean(values)))
    return {name: np.array(values) for name, values in curves.items()}


@pytest.mark.parametrize(("anchors", "tail"), [(1, 1), (3, 2), (0, 1)])
def test_numbers_are_those_of_transformers(
    anchors: int,
    tail: int,
    model: Path,
    diagnose: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert diagnose(model, anchors=anchors, tail=tail, answer_tokens=6) == 0
    record = written(tmp_path)
    group = record["groups"]["own"]
    assert record["groups"]["all"] == group and group["prompts"] == len(PROMPTS)
    facts = {"method": "speed", "layers": LAYERS, "anchors": anchors, "tail": tail, "asked": "own"}
    assert facts.items() <= record.items() and {"date", "versions", "key"} <= record.keys()
    assert record["prompts"]["tokens"] == [40, 55, 33]

    dense = speed.load(model)
    answers = [sample["answer"] for sample in record["samples"]]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        greedy = speed.generate(dense, prompt, cutoff=None, max_tokens=6, ignore_eos=False)
        assert answer == greedy.tokens

    each = [by_hand(dense, prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    for curves, prompt in zip(each, PROMPTS, strict=True):
        curves["normalised"] = curves["entropy"] / math.log(len(prompt) - 1)
        curves["straightening"] = curves["curvature"][0] - curves["curvature"]
    means = {name: np.mean([curves[name] for curves in each], axis=0) for name in each[0]}
    assert means.keys() == group["curves"].keys()
    for name, values in means.items():
        assert group["curves"][name] == pytest.approx(values, rel=2e-3, abs=2e-3), name

    # Table 23 and 24, layers from 1.
    def difference(curves: dict[str, np.ndarray]) -> int:
        return int(curves["normalised"].argmin()) - int(curves["straightening"].argmax())

    peaks = group["peaks"]
    for name in ("user", "first", "earlier", "straightening"):
        assert peaks[name] == 1 + means[name].argmax(), name
    assert peaks["entropy"] == 1 + means["normalised"].argmin()
    assert peaks["difference"] == difference(means)
    related = np.corrcoef(means["straightening"], -means["normalised"])[0, 1]
    assert peaks["correlation"] == pytest.approx(related, abs=1e-2)
    gaps = np.array([difference(curves) for curves in each])
    assert [sample["peaks"]["difference"] for sample in record["samples"]] == gaps.tolist()
    expected = [gaps.mean(), gaps.std(), *((abs(gaps) <= most).mean() for most in (0, 1, 2))]
    assert list(group["alignment"].values()) == pytest.approx(expected)

    # Every cutoff, under a mask.
    assert record["cutoffs"] == [1, 2, 3, 4]
    for row, cutoff in enumerate(record["cutoffs"]):
        kl, same = [], []
        for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
            full = speed.score(dense, prompt, answer, cutoff=None)
            cut = speed.score(dense, prompt, answer, cutoff=cutoff, anchors=anchors, tail=tail)
            terms = full.logprobs.exp() * (full.logprobs - cut.logprobs)
            kl.append(terms.double().sum(dim=1))
            same.append(torch.tensor(full.argmax) == torch.tensor(cut.argmax))
            sample = record["samples"][number]
            assert sample["kl"][row] == pytest.approx(kl[-1].mean().item(), rel=1e-3, abs=1e-4)
            assert sample["same"][row] == same[-1].double().mean().item()
        mean = torch.cat(kl).mean().item()
        assert group["cut"]["kl"][row] == pytest.approx(mean, rel=1e-3, abs=1e-4) and mean > 0.01
        assert group["cut"]["same"][row] == torch.cat(same).double().mean().item()
    assert group["cut"]["tokens"] == sum(map(len, answers))
    out = capsys.readouterr()
    assert "prompt 3/3, 33 tokens" in out.err and "speed-K runs the whole prompt" in out.out


def test_an_answer_of_one_token(small: Path, diagnose: Callable[..., int], tmp_path: Path) -> None:
    """Its only token is run to be looked at, and predicted by the prompt's last one alone."""
    assert diagnose(small, answer_tokens=1) == 0
    record, dense = written(tmp_path), speed.load(small)
    for prompt, sample in zip(PROMPTS, record["samples"], strict=True):
        full, cut = (speed.score(dense, prompt, sample["answer"], cutoff=k) for k in (None, 2))
        kl = (full.logprobs.exp() * (full.logprobs - cut.logprobs)).sum().item()
        assert sample["kl"][1] == pytest.approx(kl, rel=1e-3, abs=1e-4)
        assert sample["answer"] == full.argmax
    curves = [by_hand(dense, PROMPTS[i], record["samples"][i]["answer"]) for i in range(3)]
    mean = np.mean([each["user"] for each in curves], axis=0)
    assert record["groups"]["own"]["curves"]["user"] == pytest.approx(mean, abs=2e-3)


def test_cutoffs_are_thinned(
    small: Path, diagnose: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diagnose(small, answer_tokens=4) == 0
    every = written(tmp_path)
    assert diagnose(small, answer_tokens=4, every=2) == 0
    thinned = written(tmp_path)
    assert thinned["cutoffs"] == [2, 4]
    expected = every["groups"]["all"]["cut"]["kl"][1::2]
    assert thinned["groups"]["all"]["cut"]["kl"] == pytest.approx(expected)
    capsys.readouterr()


# The demo checkpoint, tuned for cutoffs 4 to 6.


@nightly
def test_diagnosis_of_the_demo_checkpoint(
    diagnose: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It follows no instruction, so it is asked its own notes and no chat questions."""
    assert diagnose(LOOKUP, prompts=None, count=4, length=512) == 0
    record = written(tmp_path)
    assert record["asked"] == "notes" and list(record["groups"]) == ["all", "lookups"]
    cut = record["groups"]["lookups"]["cut"]
    assert min(cut["same"][3:]) == 1 and max(cut["same"][:3]) < 0.8
    assert max(cut["kl"][3:]) < 0.01 and min(cut["kl"][:3]) > 1
    assert cut["smallest"] == {"0.9": 4, "0.99": 4}
    out = capsys.readouterr()
    highest = max(
        record["groups"]["lookups"]["peaks"][name] for name in ("entropy", "straightening")
    )
    limits = suggested(highest, 8)
    assert record["groups"]["lookups"]["suggested"] == {"above": highest, "range": limits}
    [row] = [line.split() for line in out.out.splitlines() if line.endswith(f"{cut['tokens']}")]
    rule = "none" if limits is None else f"K={limits[0]}..{limits[1]}"
    assert row == ["lookups", "4", f"L{highest}", rule, "K>=4", "K>=4", f"{cut['tokens']}"]
    marked = [line for line in out.out.splitlines() if "<- entropy min" in line]
    assert [int(line.split()[0]) for line in marked] == [
        record["groups"]["lookups"]["peaks"]["entropy"]
    ]
    assert str(tmp_path / "out" / "diagnosis-speed.json") in out.out
    pytest.importorskip("matplotlib")
    for name in ("speed-layers.png", "speed-cutoffs.png"):
        assert (tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG"


# Whose tokens are the user's.

CHAT = (
    "{{ '<|begin|>You answer questions.\n' }}{% for message in messages %}<|begin|>"
    "{{ message['role'] }}\n{{ message['content'] | trim }}\n{% endfor %}{{ 'assistant\n' }}"
)


def test_the_template_is_not_the_users() -> None:
    tokenizer = AutoTokenizer.from_pretrained(LOOKUP)
    tokenizer.chat_template = CHAT
    probes = chat_probes(tokenizer)
    assert [probe.category for probe in probes] == ["chat"] * len(CHAT_QUESTIONS)
    for probe, question in zip(probes, CHAT_QUESTIONS, strict=True):
        ids = list(probe.token_ids)
        first, last = probe.user[0], probe.user[-1]
        assert probe.user == tuple(range(first, last + 1))
        plain = tokenizer(question, add_special_tokens=False)["input_ids"]
        # Tokens at the edges may hold a newline of the template.
        assert ids[first + 1 : last] == plain[1:-1]
        assert "question" in tokenizer.decode(ids[:first]) and first > 3
        assert tokenizer.decode(ids[last + 1 :]).strip().endswith("assistant")
    config = AutoConfig.from_pretrained(LOOKUP)
    for probe in lookup_probes("notes", 2, 300, 8, tokenizer, config):
        text = tokenizer.decode([probe.token_ids[i] for i in probe.user])
        assert probe.score is not None and probe.score.prompt.sample.text.strip() in text.strip()
        assert len(probe.token_ids) <= 300
    # The first token is nobody's, also without a template.
    tokenizer.chat_template = None
    for probe in chat_probes(tokenizer):
        assert probe.user == tuple(range(1, len(probe.token_ids)))


def test_special_tokens_are_not_the_users(tmp_path: Path) -> None:
    tokenizer, config = AutoTokenizer.from_pretrained(LOOKUP), AutoConfig.from_pretrained(LOOKUP)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": [begin, 50, 51, end, begin, 52]}))
    (probe,) = own_probes(str(file), str(LOOKUP), config, None, None)
    assert probe.user == (1, 2, 5)


# The choice.


def test_the_papers_range() -> None:
    """Its highest peak is L19 of 32, and its cutoffs 24 and 28."""
    assert suggested(19, 32) == [24, 28]
    assert suggested(22, 32) == [27, 31]
    assert suggested(26, 32) == [31, 31]
    assert suggested(27, 32) is None
    assert suggested(2, 8) == [4, 5]


def test_the_smallest_cutoff() -> None:
    cutoffs, same = [2, 4, 6, 8], [0.95, 0.8, 0.9, 1.0]
    assert smallest(cutoffs, same, 0.9) == 6
    assert smallest(cutoffs, same, 0.99) == 8
    assert smallest(cutoffs, same, 0.5) == 2
    assert smallest([2, 4], [1.0, 0.9], 0.95) is None


# What cannot be done.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pivot": 1}, "--pivot has no meaning without --method structkv"),
        ({"window": 8}, "--window has no meaning without --method structkv"),
        ({"kv_rate": 0.1}, "--kv-rate has no meaning without --method structkv"),
        ({"weights": "0.2,0.3,0.5"}, "--weights has no meaning without --method structkv"),
        ({"method": "structkv", "tail": 1}, "--tail has no meaning without --method speed"),
        ({"method": None, "every": 1}, "--every has no meaning without --method speed"),
        ({"method": None, "count": 4}, "--count has no meaning without --method speed"),
        ({"count": 4}, "--count is for generated lookups: leave it out, or --prompts"),
        ({"length": 400}, "--length is for generated lookups"),
        ({"prompts": None, "max_prompt_tokens": 90}, "lookups have --length"),
        ({"prompts": None}, "has no tokenizer that loads"),
        ({"anchors": -1}, "anchors must be an integer of at least 0"),
        ({"tail": 0}, "tail must be an integer of at least 1"),
        ({"every": 5}, "--every 5 leaves no cutoff of 1 to 4"),
        ({"anchors": 30, "tail": 3}, "prompt 3 has 33 tokens, all of them anchors or tail"),
        ({"answer_tokens": 4060}, "prompt 1 has 40 tokens, which leave no room for 4060 more"),
        ({"max_prompt_tokens": 2, "anchors": 0}, "prompt 1 has 1 tokens beside the first"),
        ({"device": "tpu9"}, "device must be auto, cpu, cuda"),
    ],
)
def test_bad_options(
    options: dict[str, Any],
    message: str,
    small: Path,
    diagnose: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert diagnose(small, **options) == 2
    out = capsys.readouterr()
    [line] = [line for line in out.err.splitlines() if "error:" in line]
    assert line.startswith("vllm-kvx diagnose: error: ") and message in line and not out.out


def test_a_model_of_one_layer(
    tmp_path: Path, diagnose: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_model(tmp_path / "one", arch="llama", layers=1, vocab=VOCAB)
    assert diagnose(model) == 2
    assert "speed needs at least 2" in capsys.readouterr().err


def test_out_of_range(
    tmp_path: Path, diagnose: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that are not finite are found out before anything is written."""
    model = build_model(tmp_path / "model", arch="llama", layers=2, vocab=VOCAB)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert diagnose(model) == 2
    assert "are not finite" in capsys.readouterr().err
    assert not (tmp_path / "out" / "diagnosis-speed.json").exists()

"""Layers that are chosen by answers: the commands, the questions, and what cannot be done."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import build_model
from safetensors.torch import load_file, save_file
from support.models import LOOKUP
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from benchmarks.checkpoint.prompts import make_prompt
from vllm_kvx.cli import main
from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.records.model_key import ModelIdentity
from vllm_kvx.server.measured_layers import layer_of
from vllm_kvx.tools.calibrate import by_answers
from vllm_kvx.tools.calibrate.trials import Candidate
from vllm_kvx.tools.checkpoint import questions
from vllm_kvx.tools.checkpoint.answers import Choice

REAL = questions.CALIBRATION


def nothing(_: int) -> None:
    """No progress."""


# From end to end, on the checkpoint that answers.


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `calibrate` on a model, with lookups of the one kind that the demo checkpoint answers.

    Returns the code and what it said on stdout and on stderr.
    """
    for module in (questions, by_answers):
        monkeypatch.setattr(module, "CALIBRATION", {"notes": ("notes",)})

    def run(model: Path = LOOKUP, *flags: str, **options: Any) -> tuple[int, str, str]:
        argv = ["calibrate", str(model), "--device", "cpu", "--no-plot", *flags]
        for name, value in {"count": 16, "length": 240, **options}.items():
            if value is not None:
                argv += [f"--{name.replace('_', '-')}", str(value)]
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def test_the_demo_checkpoint(command: Callable[..., Any], cache: Path) -> None:
    """Its layers 0 to 3 find the answer, so the third is the earliest that may propagate."""
    code, out, err = command(tsp_rate=0.2)
    assert code == 0 and "prompt 16/16" in err and "answers under layer 3 by sum" in err
    [path] = cache.glob("calibration/*.json")
    record = json.loads(path.read_text())
    facts = {
        **{"method": "fastkv", "criterion": "answers", "layers": 8, "tsp_layer": 3},
        **{"reduction": "sum", "window": 8, "kernel": 7, "tsp_rate": 0.2, "answered": 16},
        **{"target": 0.98, "least": 0.8, "asked": "notes", "paper": {}},
        **{"chosen_by": 16, "confirmed_by": 32, "confirmation_answered": 32},
    }
    assert facts.items() <= record.items() and record["prompts"]["count"] == 48
    scores = record["scores"]["0.2"]
    assert scores["sum"][3] == 1 and max(scores["sum"][:3]) < 0.9 and len(scores["max"]) == 7
    [trial] = record["trials"]
    place = {"layer": 3, "rate": 0.2, "reduction": "sum", "score": 1}
    assert place.items() <= trial.items()
    for each, count in ((trial, 16), (trial["confirmation"], 32)):
        assert each["kept"] == each["asked"] == each["prompts"] == count and each["complete"]
        assert each["share"][1] == pytest.approx(count / (count + 1.96**2), abs=1e-4)
    [marked] = [line for line in out.splitlines() if "<- tsp_layer" in line]
    assert marked.split()[0] == "3" and f"{record['prefill']['0.2'][3]:.2f}x" in marked
    assert "The full model answers 16 of the 16 lookups." in out
    assert "It answers 32 of 32 others, which confirm." in out
    name = "layer 3, sum, tsp_rate 0.2"
    assert f"Answers under {name}: 16 of 16 stay, 100.0% [80.6-100.0]" in out
    assert f"Confirmation of {name}: 32 of 32 stay, 100.0% [89.3-100.0]" in out
    identity = ModelIdentity(str(LOOKUP), AutoConfig.from_pretrained(LOOKUP).to_dict())
    for mine in (FastKV(), FastKV(tsp_rate=0.2)):
        found = layer_of(mine, identity, 8)
        assert found == (3, f"calibrated by answers: {path}", "sum", None)
    assert "rates" not in record and "--kv-policy fastkv:kv_rate=0.4,tsp_rate=0.2` finds it" in out
    assert out.endswith("Anywhere else: --kv-policy fastkv:kv_rate=0.4,tsp_layer=3\n")
    for other in (FastKV(tsp_rate=0.3), FastKV(window=4), FastKV(kernel=5)):
        assert layer_of(other, identity, 8) is None


def test_texts_of_facts_alone(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """What the demo checkpoint is asked unless a test says otherwise."""
    for module in (questions, by_answers):
        monkeypatch.setattr(module, "CALIBRATION", {"notes": REAL["notes"]})
    code, out, _ = command(count=17, tsp_rate=0.2)
    assert code == 0 and "The full model answers 17 of the 17 lookups." in out
    [path] = cache.glob("calibration/*.json")
    assert json.loads(path.read_text())["tsp_layer"] == 3


def test_a_rate_that_is_left_open_is_searched_for(
    command: Callable[..., Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less is computed by twice the tokens above a lower layer, and the record says so."""
    code, out, err = command()
    assert code == 0
    [path] = cache.glob("calibration/*.json")
    record = json.loads(path.read_text())
    assert record["rates"] == [0.2, 0.3, 0.4] and list(record["scores"]) == ["0.2", "0.3", "0.4"]
    chosen = record["trials"][-1]
    assert chosen["confirmation"]["share"][1] > 0.8 and chosen["confirmation"]["prompts"] == 32
    layer, rate = record["tsp_layer"], record["tsp_rate"]
    assert (layer, rate) == (chosen["layer"], chosen["rate"])
    # What was tried before is less work yet, and was not enough.
    gains = [record["prefill"][str(each["rate"])][each["layer"]] for each in record["trials"]]
    assert gains == sorted(gains, reverse=True)
    assert all(each["share"][1] < 0.8 for each in record["trials"][:-1])
    assert f"<- tsp_layer, by {record['reduction']} at {rate}" in out
    assert f"answers under layer {layer} by {record['reduction']} at {rate}: 1/32" in err
    identity = ModelIdentity(str(LOOKUP), AutoConfig.from_pretrained(LOOKUP).to_dict())
    found = layer_of(FastKV(), identity, 8)
    assert found is not None and found.layer == layer
    wanted = FastKV.to_measure
    values = found.values(wanted)
    assert values.get("tsp_rate", 0.2) == rate and values["tsp_layer"] == layer
    other = next(each for each in record["rates"] if each != rate)
    assert layer_of(FastKV(tsp_rate=rate), identity, 8) is not None
    assert layer_of(FastKV(tsp_rate=other), identity, 8) is None


def test_all_criteria_side_by_side(
    command: Callable[..., Any], cache: Path, tmp_path: Path
) -> None:
    code, out, _ = command(LOOKUP, "--compare")
    assert code == 0 and "Eq. 3" in out and "<- the paper's" in out
    code, out, _ = command(method="structkv")
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
    prompts = [make_prompt(seed, 300, tokenizer, values=2)[0] for seed in range(32)]
    (tmp_path / "prompts.txt").write_text("\n---\n".join(prompts))
    options = {"prompts": tmp_path / "prompts.txt", "count": None, "length": None}
    code, out, _ = command(**options, tsp_rate=0.2)
    assert code == 0 and "The full model's own answers to the 32 prompts" in out
    [path] = cache.glob("calibration/*.json")
    record = json.loads(path.read_text())
    assert record["asked"] == "own" and record["prompts"]["tokens"] == [300] * 32
    trial = record["trials"][-1]
    assert trial["kept"] == trial["asked"] >= 64 and record["tsp_layer"] == trial["layer"] == 3
    assert all(trial["layer"] < 3 for trial in record["trials"][:-1])
    # So few prompts both choose and confirm.
    assert {**trial["confirmation"]}.items() <= trial.items() and record["confirmed_by"] == 32


def test_no_layer_keeps_enough(
    command: Callable[..., Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where next to nothing goes on already above a layer that has not found the answer."""
    only = Candidate(1, Choice(0.03, "sum"), 0.5, 0.3)
    monkeypatch.setattr(by_answers, "candidates", lambda *_, **__: [only])
    code, out, err = command(method="structkv", struct_rate=0.03)
    [line] = [line for line in err.splitlines() if "error:" in line]
    assert code == 2 and "no layer keeps enough: under the best of 1 that were tried, layer" in line
    assert "layer 1 by sum with struct_rate=0.03, which propagates 50% of what answers" in line
    assert "of those asked stay, lost: 1 of notes; at least 80% have to with a certainty" in line
    assert "give a higher --struct-rate, use --kv-policy fier-1024, or choose" in line
    assert "Answers under layer 1, sum, struct_rate 0.03: " in out and "it was hopeless" in out
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
    code, _, err = command(model)
    [line] = [line for line in err.splitlines() if "error:" in line]
    assert code == 2 and "the full model answers 0 of 16 generated lookups, and 16 are" in line
    assert "--prompts FILE, raise --count, or use --kv-policy fier-1024" in line
    assert not list(cache.glob("calibration/*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tsp_rate": 1}, "a rate of 1 drops no token"),
        ({"method": "structkv", "struct_rate": 1}, "a rate of 1 drops no token"),
        ({"length": 8}, "notes: its shortest prompt has"),
        (
            {"count": 15},
            "15 prompts: even a layer that keeps every answer is not known to keep 80%",
        ),
        ({"count": 15}, "by fewer than 16 right ones: use a greater --count, or a lower --least"),
        ({"least": 0.9, "count": 34}, "34 prompts: even a layer that keeps every answer"),
        ({"least": 1}, "no number of prompts shows that every answer stays"),
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


def test_a_model_without_a_tokenizer(tmp_path: Path, command: Callable[..., Any]) -> None:
    code, _, err = command(build_model(tmp_path / "tiny", arch="llama", layers=5))
    assert code == 2 and "no tokenizer that loads, so no lookups can be generated" in err

"""`vllm-kvx diagnose`: what selections recover of attention, against sums by hand."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import structkv
from support.calibrating import PROMPTS, WEIGHTS, WINDOW, build_focused
from support.models import LOOKUP
from support.nightly import nightly
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.checkpoint.prompts import make_prompt
from vllm_kvx.policy.methods.structkv import online_limits, paper_limits


def bounded(metrics: dict[str, torch.Tensor]) -> int:
    """The reference's pivot within the tool's default limits."""
    scores = structkv.transition_scores(metrics, WEIGHTS).tolist()
    low, high = paper_limits(len(scores))
    return max(range(low, high + 1), key=lambda pivot: (scores[pivot - 1], -pivot))


@torch.no_grad()
def recovery_by_hand(
    path: Path, prompt: list[int], layer: int, rate: float, kv_rate: float
) -> dict[str, list[float]]:
    """Figure 5 from transformers' own attention, key by key."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    out = model.model(torch.tensor([prompt]), output_attentions=True, use_cache=False)
    rows = [a[0, :, -WINDOW:].double().numpy() for a in out.attentions]  # (H, w, N) each
    total, groups = len(prompt), model.config.num_key_value_heads
    before, recent = total - WINDOW, list(range(total - WINDOW, total))

    def pooled(scores: np.ndarray, kernel: int, of: Callable[..., float]) -> np.ndarray:
        padded = np.pad(scores, kernel // 2)
        return np.array([of(padded[key : key + kernel]) for key in range(len(scores))])

    def best(scores: np.ndarray, count: int, unpooled: np.ndarray | None = None) -> list[int]:
        second = scores if unpooled is None else unpooled
        order = sorted(range(before), key=lambda key: (-scores[key], -second[key], key))
        return order[: count - WINDOW] + recent

    centrality = np.zeros(before)
    for attention in rows[: layer + 1]:
        centrality = 0.9 * centrality + attention.sum(axis=(0, 1))[:before]
    fastkv = sum(pooled(head.sum(axis=0)[:before], 7, np.max) for head in rows[layer])
    gemfilter = pooled(rows[layer][:, -1, :before].sum(axis=0), 5, np.mean)
    count, cap = max(int(total * rate), WINDOW), max(int(total * kv_rate), WINDOW)
    scores = {"structkv": centrality, "fastkv": fastkv, "gemfilter": gemfilter}
    summed = {"fastkv": rows[layer].sum(axis=(0, 1))[:before]}
    sets = {name: best(values, count, summed.get(name)) for name, values in scores.items()}
    result: dict[str, list[float]] = {
        name: [
            1.0 if index <= layer and name != "gemfilter" else attention[..., keys].sum(-1).mean()
            for index, attention in enumerate(rows)
        ]
        for name, keys in sets.items()
    }
    result["snapkv"] = []
    for attention in rows:
        mass = 0.0
        for group in np.split(attention, groups):
            local = sum(pooled(head.sum(axis=0)[:before], 7, np.max) for head in group)
            kept = best(local, cap, group.sum(axis=(0, 1))[:before])
            mass += group[..., kept].sum(-1).mean() / groups
        result["snapkv"].append(mass)
    return result


@nightly
def test_diagnosis_of_the_demo_checkpoint(
    run_tool: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(LOOKUP)
    texts = [make_prompt(seed, 512, tokenizer)[0] for seed in range(3)]
    (tmp_path / "lookup.txt").write_text("\n---\n".join(texts))
    options = {"prompts": tmp_path / "lookup.txt", "struct_rate": 0.25, "kv_rate": 0.2}
    # Its layers 0 to 3 find the answer.
    assert run_tool("diagnose", LOOKUP, pivot=3, **options) == 0
    out = capsys.readouterr()
    directory = tmp_path / "out"
    record = json.loads((directory / "diagnosis.json").read_text())
    assert str(directory / "diagnosis.json") in out.out and "prompt 3/3" in out.err

    prompts = [tokenizer(text)["input_ids"] for text in texts]
    expected = structkv.metrics(str(LOOKUP), prompts, WINDOW)
    low, high = online_limits(8)
    assert record["pivot"] == 3
    assert record["measured"]["pivot"] == bounded(expected)
    assert record["online"]["pivot"] == structkv.online_pivot(expected, WEIGHTS, low, high)
    alone = [structkv.metrics(str(LOOKUP), [prompt], WINDOW) for prompt in prompts]
    assert record["measured"]["prompts"] == [bounded(each) for each in alone]
    assert record["online"]["prompts"] == [
        structkv.online_pivot(each, WEIGHTS, low, high) for each in alone
    ]
    for name, values in expected.items():
        assert record["metrics"][name] == pytest.approx(values.tolist(), rel=1e-3)

    assert set(record["recovery"]) == {"structkv", "fastkv", "gemfilter", "snapkv"}
    for index, prompt in enumerate(prompts):
        by_hand = recovery_by_hand(LOOKUP, prompt, 3, 0.25, 0.2)
        for method, values in by_hand.items():
            actual = record["recovery"][method]["prompts"][index]
            assert actual == pytest.approx(values, abs=1e-3), method
    for method, values in record["recovery"].items():
        assert values["mean"] == pytest.approx(np.mean(values["prompts"], axis=0)), method
        assert f"{method} {np.mean(values['mean'][4:]):.3f}" in out.out
    # The paper's finding: what one layer ignores, the layers above may want.
    above = {method: np.mean(values["mean"][4:]) for method, values in record["recovery"].items()}
    assert above["structkv"] > above["fastkv"] + 0.05 > above["gemfilter"] + 0.1
    pytest.importorskip("matplotlib")
    for name in ("pivot.png", "recovery.png"):
        assert (directory / name).read_bytes()[:4] == b"\x89PNG"


@nightly
def test_diagnosis_after_a_given_layer(run_tool: Callable[..., int], tmp_path: Path) -> None:
    """Of a model with every query head its own KV head, and where two heads share one."""
    for kv_heads in (2, 1):
        model = build_focused(tmp_path / f"kv{kv_heads}", 6, 3, kv_heads=kv_heads)
        assert run_tool("diagnose", model, pivot=1, struct_rate=0.3, kv_rate=0.3) == 0
        record = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
        assert record["pivot"] == 1 and record["measured"]["pivot"] == 4
        assert record["struct_rate"] == record["kv_rate"] == 0.3
        for index, prompt in enumerate(PROMPTS):
            for method, values in recovery_by_hand(model, prompt, 1, 0.3, 0.3).items():
                actual = record["recovery"][method]["prompts"][index]
                assert actual == pytest.approx(values, abs=1e-3), method


def test_selecting_everything_recovers_everything(
    focused: Path, run_tool: Callable[..., int], tmp_path: Path
) -> None:
    assert run_tool("diagnose", focused, pivot=0, struct_rate=1, kv_rate=1) == 0
    record = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    for method, values in record["recovery"].items():
        assert values["mean"] == pytest.approx([1.0] * 5), method


def test_diagnosis_lies_where_it_is_asked_for(
    focused: Path,
    run_tool: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    # At the last layer there is nothing to compare above it.
    assert run_tool("diagnose", focused, output=None, pivot=4) == 0
    written = [path.name for path in (tmp_path / f"diagnose-{focused.name}").iterdir()]
    assert written == ["diagnosis.json"]
    out = capsys.readouterr().out
    assert "pip install 'vllm-kvx[tools]'" in out and "there is no layer above" in out

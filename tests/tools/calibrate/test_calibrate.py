"""`vllm-kvx calibrate --criterion paper`: Eq. 3 against brute force, and the command."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from reference import wrappers, zoo
from reference.models import ARCHS, build_model
from support import inside
from support.calibrating import LAYERS, write_prompts
from support.models import LOOKUP
from support.nightly import by_day
from support.prompts import prompt_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from benchmarks.checkpoint.prompts import make_prompt
from vllm_kvx.cli import main
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.records.model_key import ModelIdentity
from vllm_kvx.server.measured_layers import layer_of
from vllm_kvx.tools.calibrate import tsp_layer as calibrate
from vllm_kvx.tools.calibrate.tsp_layer import choose_max_layer, distances
from vllm_kvx.tools.checkpoint.dense_decoder import DenseDecoder
from vllm_kvx.tools.checkpoint.prompts import read_prompts, shorten, tokenize

POLICY = FastKV(tsp_rate=0.3, window=4, kernel=5)
EXPERTS = ("qwen3_moe", "mixtral")
WRAPPERS = list(wrappers.WRAPPERS)


@pytest.fixture(
    scope="module",
    params=[*((arch, 2) for arch in (*ARCHS, *EXPERTS)), ("llama", 4)],
    ids=str,
)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    arch, kv_heads = request.param
    if arch in EXPERTS:
        return zoo.build(tmp_path_factory.mktemp(arch), arch, num_hidden_layers=LAYERS)
    return build_model(tmp_path_factory.mktemp(arch), arch=arch, kv_heads=kv_heads, layers=LAYERS)


@torch.no_grad()
def brute_force(path: Path, prompt: list[int], policy: FastKV, max_layer: int) -> list[float]:
    """Eq. 3 with transformers' own layers over every row, and masks that hide what was dropped."""
    is_wrapper = "text_config" in json.loads((path / "config.json").read_text())
    loader = AutoModelForImageTextToText if is_wrapper else AutoModelForCausalLM
    model: Any = loader.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    total, window = len(prompt), policy.window
    ids = torch.tensor([prompt])
    # A wrapper's own states are those of its language model.
    full = model(ids, output_attentions=True, output_hidden_states=True, use_cache=False)
    decoder = model.eval().model.language_model if is_wrapper else model.eval().model
    wanted = full.hidden_states[-1][0, -1].double()
    rotary = decoder.rotary_emb(full.hidden_states[0], torch.arange(total)[None])
    count = max(int(total * policy.token_rate), window)
    result = []
    for candidate in range(max_layer + 1):
        scores, unpooled = np.zeros(total - window), np.zeros(total - window)
        for head in full.attentions[candidate][0].double().numpy():
            mass = head[-window:].sum(axis=0)[: total - window]
            unpooled += mass
            for key in range(total - window):
                half = policy.kernel // 2
                scores[key] += mass[max(key - half, 0) : key + half + 1].max()
        best = sorted(range(total - window), key=lambda key: (-scores[key], -unpooled[key], key))
        seen = torch.zeros(total, dtype=torch.bool)
        seen[best[: count - window]] = True
        seen[total - window :] = True
        mask = torch.full((total, total), float("-inf")).triu(1)
        mask[:, ~seen] = float("-inf")
        # A hidden row may see itself, so that it is finite; nobody reads it.
        mask.fill_diagonal_(0)
        hidden = full.hidden_states[candidate + 1]
        for layer in decoder.layers[candidate + 1 :]:
            out = layer(hidden, attention_mask=mask[None, None], position_embeddings=rotary)
            hidden = out[0] if isinstance(out, tuple) else out
        state = decoder.norm(hidden)[0, -1].double()
        result.append(float(((wanted - state) ** 2).sum() / (wanted**2).sum()))
    return result


@pytest.mark.parametrize("length", [8, 37, 120])
def test_distances_are_brute_force(
    path: Path, length: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slices, and a shorter last one.
    inside.slice_rows(monkeypatch, 32)
    decoder = DenseDecoder.load(str(path), device, dtype="float32")
    prompt = prompt_of(length, seed=length)
    for policy in (POLICY, FastKV(window=2, kernel=1)):
        actual = distances(decoder, prompt, policy, LAYERS - 2)
        expected = brute_force(path, prompt, policy, LAYERS - 2)
        assert actual == pytest.approx(expected, rel=1e-3, abs=1e-8)
        assert all(distance > 1e-4 for distance in actual)


@pytest.mark.parametrize("name", by_day(WRAPPERS, {WRAPPERS.index("qwen3_vl")}))
def test_distances_in_models_that_also_read_images(name: str, tmp_path: Path, device: str) -> None:
    path = wrappers.build(tmp_path / name, name, layers=LAYERS)
    prompt = prompt_of(40)
    actual = distances(DenseDecoder.load(str(path), device, "float32"), prompt, POLICY, LAYERS - 2)
    assert actual == pytest.approx(
        brute_force(path, prompt, POLICY, LAYERS - 2), rel=1e-3, abs=1e-8
    )


def test_layers_are_the_models(six_layers: Path) -> None:
    """Every layer's output, and the window's attention, as transformers computes them."""
    decoder = DenseDecoder.load(str(six_layers), device="cpu")
    model = AutoModelForCausalLM.from_pretrained(
        six_layers, dtype=torch.float32, attn_implementation="eager"
    )
    prompt = prompt_of(50)
    with torch.no_grad():
        out = model.model(torch.tensor([prompt]), output_attentions=True, output_hidden_states=True)
    rows = decoder.embed(prompt)
    # transformers' last hidden state is the one after the final norm.
    for index, (rows, attention) in enumerate(decoder.layers(rows, window=3)):  # noqa: B020
        assert attention is not None and attention.dtype == torch.float32
        torch.testing.assert_close(attention, out.attentions[index][0, :, -3:], atol=1e-5, rtol=0)
        if index + 1 < LAYERS:
            expected = out.hidden_states[index + 1][0]
            torch.testing.assert_close(rows.hidden, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        decoder.last_state(rows), out.last_hidden_state[0, -1], atol=1e-4, rtol=0
    )
    assert all(attention is None for _, attention in decoder.layers(decoder.embed(prompt)))


def test_the_lowest_of_the_best_layers_is_chosen() -> None:
    measured = calibrate.Distances([[4.0, 1.0, 3.0, 1.0], [2.0, 3.0, 0.0, 3.0]])
    assert measured.mean == [3.0, 2.0, 1.5, 2.0] and measured.tsp_layer == 2
    assert measured.std == [1.0, 1.0, 1.5, 1.0]
    assert calibrate.Distances([[4.0, 1.0, 1.0]]).tsp_layer == 1


@pytest.mark.parametrize(
    ("layers", "wanted", "expected"),
    [
        (32, None, 15),
        (36, None, 17),
        (40, None, 19),
        (8, None, 3),
        (3, None, 0),
        (2, None, 0),
        (8, 6, 6),
        (8, 0, 0),
        (8, 7, "0 .. 6"),
        (8, -1, "0 .. 6"),
        (1, None, "1 layer"),
    ],
)
def test_max_layer(layers: int, wanted: int | None, expected: int | str) -> None:
    if isinstance(expected, int):
        assert choose_max_layer(layers, wanted) == expected
    else:
        with pytest.raises(ToolError, match=expected):
            choose_max_layer(layers, wanted)


def test_prompt_files(tmp_path: Path) -> None:
    text = tmp_path / "p.txt"
    text.write_bytes("\ufeffone\n\ntwo --- \n---\r\nthree\n--- \n\n---\n ---\nfour\n".encode())
    assert read_prompts(text) == ["one\n\ntwo --- ", "three", " ---\nfour"]
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a\\u2028b"}\n\n{"prompt_token_ids": [1, 2], "id": 7}')
    assert read_prompts(lines) == ["a\u2028b", [1, 2]]


def test_long_prompts_lose_their_middle() -> None:
    assert shorten([1, 2, 3, 4, 5, 6], 3) == [1, 5, 6]
    assert shorten([1, 2, 3, 4, 5, 6], 4) == [1, 2, 5, 6]
    assert shorten([1, 2, 3], 1) == [3]
    assert shorten([1, 2, 3], 3) == shorten([1, 2, 3], None) == [1, 2, 3]


def test_texts_and_tokens(six_layers: Path) -> None:
    assert tokenize(["w5 w6", [7, 8]], str(six_layers)) == [[5, 6], [7, 8]]
    # Token ids need no tokenizer.
    assert tokenize([[7, 8]], "/no/such/model") == [[7, 8]]


def test_the_command_stores_what_a_server_finds(
    six_layers: Path,
    by_paper: Callable[..., int],
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert by_paper(six_layers, "--no-plot", tsp_rate=0.3, window=4, kernel=5, max_layer=3) == 0
    out = capsys.readouterr()
    [path] = (cache / "calibration").iterdir()
    record = json.loads(path.read_text())
    rows = [brute_force(six_layers, prompt_of(40 + 10 * i, seed=i), POLICY, 3) for i in range(2)]
    assert record["distances"]["mean"] == pytest.approx(np.mean(rows, axis=0), rel=1e-3)
    assert record["distances"]["std"] == pytest.approx(np.std(rows, axis=0), rel=1e-2)
    assert record["tsp_layer"] == np.mean(rows, axis=0).argmin()
    expected = {"method": "fastkv", "layers": LAYERS, "max_layer": 3, "tsp_rate": 0.3, "window": 4}
    assert record["criterion"] == "paper"
    assert expected.items() <= record.items() and record["kernel"] == 5
    source = str(tmp_path / "prompts.jsonl")
    assert record["prompts"] == {"source": source, "count": 2, "tokens": [40, 50]}
    assert record["model"] == str(six_layers) and path.name == f"fastkv-{record['key']}.json"
    assert {"date", "versions"} <= record.keys()
    [marked] = [line for line in out.out.splitlines() if line.endswith("<- tsp_layer")]
    assert marked.split()[0] == str(record["tsp_layer"])
    assert "prompt 2/2, 50 tokens" in out.err
    config = AutoConfig.from_pretrained(six_layers).to_dict()
    found = layer_of(POLICY, ModelIdentity(str(six_layers), config), LAYERS)
    assert found is not None and found[:2] == (
        record["tsp_layer"],
        f"calibrated by the paper's criterion: {path}",
    )


@pytest.mark.parametrize("arch", EXPERTS)
def test_the_commands_on_experts(
    arch: str, by_paper: Callable[..., int], cache: Path, tmp_path: Path
) -> None:
    model = zoo.build(tmp_path / arch, arch, num_hidden_layers=4)
    assert by_paper(model, "--no-plot", tsp_rate=0.3, window=4, kernel=5, max_layer=2) == 0
    prompts = write_prompts(tmp_path / "diagnosed.jsonl", prompt_of(40))
    for method in ("structkv", "speed"):
        argv = ["diagnose", str(model), "--method", method, "--prompts", str(prompts)]
        argv += ["--device", "cpu", "--output", str(tmp_path / method)]
        assert main(argv + (["--answer-tokens", "4"] if method == "speed" else [])) == 0


def test_the_curve_is_drawn_where_it_is_wanted(
    by_paper: Callable[..., int],
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    assert by_paper() == 0
    [picture] = cache.glob("calibration/*.png")
    assert picture.with_suffix(".json").exists() and str(picture) in capsys.readouterr().out
    assert by_paper(plot=tmp_path / "here.png") == 0
    assert (tmp_path / "here.png").read_bytes()[:4] == b"\x89PNG"
    assert by_paper(plot=tmp_path / "no" / "where.png") == 2
    assert "the result is stored, but the plot" in capsys.readouterr().err


def test_without_matplotlib(
    by_paper: Callable[..., int],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert by_paper() == 0
    assert "pip install 'vllm-kvx[tools]'" in capsys.readouterr().out
    assert [path.suffix for path in cache.glob("calibration/*")] == [".json"]


def test_prompts_are_cut(by_paper: Callable[..., int], cache: Path) -> None:
    assert by_paper(max_prompt_tokens=45) == 0
    [path] = cache.glob("calibration/*.json")
    assert json.loads(path.read_text())["prompts"]["tokens"] == [40, 45]


def test_states_out_of_range(six_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "distances", lambda *_: [0.1, float("nan")])
    decoder: Any = SimpleNamespace(num_layers=LAYERS)
    with pytest.raises(ToolError, match="not finite"):
        calibrate.measure(decoder, [[5] * 20], POLICY, 1)


def test_the_demo_checkpoint_from_end_to_end(cache: Path, tmp_path: Path) -> None:
    """Its layers 0 to 3 find the answer, so selection hurts up to layer 2 and not after layer 3."""
    tokenizer = AutoTokenizer.from_pretrained(LOOKUP)
    prompts = [make_prompt(seed, 512, tokenizer)[0] for seed in range(4)]
    (tmp_path / "prompts.txt").write_text("\n---\n".join(prompts))
    argv = ["calibrate", str(LOOKUP), "--prompts", str(tmp_path / "prompts.txt")]
    assert main([*argv, "--criterion", "paper", "--device", "cpu", "--no-plot"]) == 0
    [path] = cache.glob("calibration/*.json")
    record = json.loads(path.read_text())
    assert record["prompts"]["tokens"] == [512] * 4 and record["max_layer"] == 3
    assert record["tsp_layer"] == 3
    means = record["distances"]["mean"]
    assert means[3] < 0.05 < 0.2 < min(means[:3])
    config = AutoConfig.from_pretrained(LOOKUP).to_dict()
    found = layer_of(FastKV(), ModelIdentity(str(LOOKUP), config), 8)
    assert found is not None and found[:2] == (3, f"calibrated by the paper's criterion: {path}")

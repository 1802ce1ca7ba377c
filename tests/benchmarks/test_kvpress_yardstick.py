"""kvpress_yardstick: sharing a prefill and a batch must not change what a press does."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import LOOKUP

from benchmarks.answers import kvpress_presses, kvpress_yardstick

LENGTH, MAX_TOKENS = 150, 8


@pytest.fixture(scope="module")
def model(one_thread: None) -> Any:
    try:
        kvpress_presses.load_kvpress()
    except SystemExit:
        pytest.skip("kvpress is not installed")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2048,  # The tokenizer's of LOOKUP, which KVzip asks for its questions.
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=None,
    )
    config._attn_implementation = "sdpa"
    config.head_dim = 16
    config.name_or_path = str(LOOKUP)
    return Qwen2ForCausalLM(config).eval()


@torch.no_grad()
def alone(model: Any, token_ids: list[int], press: Any) -> list[int]:
    """The answer as kvpress itself makes it: its hooks, one press, one sequence."""
    from transformers import DynamicCache

    past, ids = DynamicCache(), torch.tensor([token_ids])
    with press(model):
        # kvpress wants to be told the position; versions of transformers differ in doing that.
        logits = model(
            ids, past_key_values=past, cache_position=torch.arange(len(token_ids))
        ).logits
    answer = [int(logits[0, -1].argmax())]
    for step in range(MAX_TOKENS - 1):
        place = torch.tensor([[len(token_ids) + step]])
        logits = model(torch.tensor([answer[-1:]]), past_key_values=past, position_ids=place).logits
        answer.append(int(logits[0, -1].argmax()))
    return answer


def test_every_press_answers_as_it_does_alone(model: Any) -> None:
    token_ids = torch.randint(
        0, 2048, (LENGTH,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    names = [
        kvpress_yardstick.cell_name(press, budget)
        for press in kvpress_presses.presses()
        for budget in (0.1, 0.5)
    ]
    with torch.no_grad():
        found = kvpress_presses.answer_all(model, token_ids, names, MAX_TOKENS, set())
    assert found.keys() == {kvpress_presses.FULL, *names}
    for name in names:
        press_name, budget = name.rsplit(" ", 1)
        press = kvpress_presses.presses()[press_name]()
        kept = int(LENGTH * float(budget))
        press.compression_ratio = 1 - (kept + 0.5) / LENGTH
        assert found[name].tokens == alone(model, token_ids, press), name
        assert found[name].entries == pytest.approx(kept, abs=2.5), name
    # The presses must matter here, or the comparison shows nothing.
    assert len({tuple(answer.tokens) for answer in found.values()}) > 5
    assert found[kvpress_presses.FULL].entries == LENGTH


def test_merged_shards_have_every_prompt_once(tmp_path: Any) -> None:
    settings = {"model": "m"}
    paths = []
    for shard in (0, 1):
        prompts = [
            {
                "length": 64,
                "task": "t",
                "index": index,
                "tokens": 60,
                "seconds": 1.0,
                "kept": {"full": 60.0, "snapkv 0.1": 6.0},
                "scores": {"full": 1.0, "snapkv 0.1": float(index % 2)},
                "answers": {},
            }
            # Of two processes; a third one asked the first's last prompt again.
            for index in (*range(shard, 8, 2), *([6] if shard else []))
        ]
        paths.append(tmp_path / f"{shard}.json")
        paths[-1].write_text(json.dumps({"settings": settings, "prompts": prompts}))
    output, ours = tmp_path / "all.json", tmp_path / "ours.json"
    scores = {"snapkv:kv_rate=0.1,after=32": 1, "snapkv:kv_rate=0.10": 0, "full": 1}
    lines = [
        {"policy": policy, "task": "t", "length": length, "scores": " ".join(f"{score}" * 9)}
        for policy, score in scores.items()
        for length in (32, 64)
    ]
    ours.write_text(json.dumps({"model": "m", "scores": lines}))
    kvpress_yardstick.merge(SimpleNamespace(files=paths, output=output, beside=[ours]))
    merged = json.loads(output.read_text())["models"]["m"]
    assert sorted(prompt["index"] for prompt in merged["prompts"]) == list(range(8))
    full, snapkv = merged["cells"]
    assert (full["percent"], full["n"]) == (100.0, 8)
    assert (snapkv["percent"], snapkv["below_full"], snapkv["kept"]) == (50.0, 50.0, 0.1)
    # Compared is what keeps as much, over the prompts that both answered.
    full, snapkv = merged["beside"]
    assert (full["policy"], full["by"][0], full["differ"]) == ("full", 0.0, 0)
    assert (snapkv["policy"], snapkv["n"]) == ("snapkv:kv_rate=0.1,after=32", 8)
    assert snapkv["by"][0] == -50.0 and snapkv["by"][2] < 0 and snapkv["differ"] == 4

"""The reference against transformers' own forward and generate, and against itself."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from . import speed
from .models import add_tokenizer, build_model
from .params import MODELS

LAYERS, CUTOFF, STEPS, VOCAB = 8, 5, 12, 512
# Rounding between two orders of the same float32 sums; engine tests have 1e-4.
ATOL = 3e-5
# The least change of a logprob that counts as a change: a hundred times what engine tests allow.
CLEAR = 1e-2


@pytest.fixture(scope="module", params=MODELS, ids=str)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    arch, kv_heads = request.param
    return build_model(tmp_path_factory.mktemp(arch), arch=arch, kv_heads=kv_heads, layers=LAYERS)


@pytest.fixture(scope="module")
def model(path: Path) -> PreTrainedModel:
    return speed.load(path)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def change(a: speed.Result, b: speed.Result) -> torch.Tensor:
    """(S,) float32: largest difference of a logprob at each step."""
    return (a.logprobs - b.logprobs).abs().amax(dim=1)


def test_full_is_transformers(path: Path, model: PreTrainedModel) -> None:
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    assert stock.config._attn_implementation == "sdpa"
    stock.generation_config = GenerationConfig()
    stock.config.eos_token_id = None
    prompt = prompt_of(97)
    ids = torch.tensor([prompt])
    tokens = stock.generate(ids, do_sample=False, max_new_tokens=STEPS)[0, 97:].tolist()
    with torch.no_grad():
        logits = stock(torch.tensor([prompt + tokens])).logits[0, 96:-1]
    result = speed.generate(model, prompt, cutoff=None, max_tokens=STEPS)
    assert result.tokens == result.argmax == tokens
    torch.testing.assert_close(result.logprobs, logits.log_softmax(-1), atol=ATOL, rtol=0)


@pytest.mark.parametrize("cutoff", [None, 0, CUTOFF])
@pytest.mark.parametrize(("anchors", "tail"), [(1, 1), (0, 1), (4, 8)])
def test_cached_dense_and_scored_agree(
    model: PreTrainedModel, cutoff: int | None, anchors: int, tail: int
) -> None:
    prompt, method = prompt_of(65), {"cutoff": cutoff, "anchors": anchors, "tail": tail}
    cached = speed.generate(model, prompt, max_tokens=STEPS, **method)
    dense = speed.generate(model, prompt, max_tokens=STEPS, dense=True, **method)
    scored = speed.score(model, prompt, cached.tokens, **method)
    assert cached.tokens == dense.tokens == scored.argmax
    assert cached.regret.max() == 0 and scored.margin.min() > 0
    assert change(cached, dense).max() < ATOL and change(cached, scored).max() < ATOL
    # A request resumed in the middle of its output knows where its prompt ended.
    resumed = speed.generate(
        model, prompt + cached.tokens[:5], max_tokens=STEPS - 5, prompt_len=65, **method
    )
    assert resumed.tokens == cached.tokens[5:]


@pytest.mark.parametrize(("anchors", "tail"), [(1, 1), (0, 1), (3, 4)])
def test_masked_rows_are_absent_rows(model: PreTrainedModel, anchors: int, tail: int) -> None:
    """The same from the definition: above the cutoff, drop the hidden rows and keep positions."""
    prompt, generated = prompt_of(80), prompt_of(6, seed=1)
    sequence = torch.tensor([prompt + generated[:-1]])
    kept = [i for i in range(sequence.shape[1]) if i < anchors or i >= 80 - tail]
    positions = torch.arange(sequence.shape[1])[None]
    with torch.no_grad():
        hidden = model.model.embed_tokens(sequence)
        for index, layer in enumerate(model.model.layers):
            if index == CUTOFF:
                hidden, positions = hidden[:, kept], positions[:, kept]
            rows = hidden.shape[1]
            mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
            rotary = model.model.rotary_emb(hidden, positions)
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
        expected = model.lm_head(model.model.norm(hidden))[0, -6:].log_softmax(-1)
    scored = speed.score(model, prompt, generated, cutoff=CUTOFF, anchors=anchors, tail=tail)
    torch.testing.assert_close(scored.logprobs, expected, atol=ATOL, rtol=0)


def test_limits_equal_full(model: PreTrainedModel) -> None:
    prompt, generated = prompt_of(50), prompt_of(STEPS, seed=1)
    full = speed.score(model, prompt, generated, cutoff=None)
    assert change(speed.score(model, prompt, generated, cutoff=LAYERS), full).max() == 0
    for anchors, tail in ((1, 1), (0, 1), (5, 3)):
        method = {"cutoff": 2, "anchors": anchors, "tail": tail}
        for length in range(1, anchors + tail + 1):
            short = speed.score(model, prompt[:length], generated, **method)
            full = speed.score(model, prompt[:length], generated, cutoff=None)
            assert change(short, full).max() == 0
        over = prompt[: anchors + tail + 1]
        full = speed.score(model, over, generated, cutoff=None)
        assert change(speed.score(model, over, generated, **method), full).max() > CLEAR


@pytest.mark.parametrize("length", [40, 600])
def test_every_part_of_the_policy_shows(model: PreTrainedModel, length: int) -> None:
    """A wrong cutoff, anchor, tail, prompt token or generated token must not pass unnoticed."""
    prompt = prompt_of(length, seed=length)
    run = speed.generate(model, prompt, cutoff=CUTOFF, max_tokens=32)
    assert len(set(run.tokens)) >= 8 and max(map(run.tokens.count, run.tokens)) <= 16
    wrong = [{"cutoff": cutoff} for cutoff in (None, CUTOFF - 1, CUTOFF + 1)]
    wrong += [{"cutoff": CUTOFF} | other for other in ({"anchors": 0}, {"anchors": 2}, {"tail": 2})]
    for method in wrong:
        assert change(speed.score(model, prompt, run.tokens, **method), run).min() > CLEAR, method
    # Lower layers still read the middle of the prompt, upper layers the generated tokens.
    other = [*prompt[: length // 2], 3, *prompt[length // 2 + 1 :]]
    assert change(speed.score(model, other, run.tokens, cutoff=CUTOFF), run).median() > CLEAR
    forgot = speed.generate(model, prompt + run.tokens[:4], cutoff=CUTOFF, max_tokens=1)
    assert (forgot.logprobs[0] - run.logprobs[4]).abs().max() > CLEAR


def test_eos_ends_the_output(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run = speed.generate(model, prompt_of(20), cutoff=None, max_tokens=STEPS)
    monkeypatch.setattr(model.config, "eos_token_id", run.tokens[4])
    ended = speed.generate(model, prompt_of(20), cutoff=None, max_tokens=STEPS, ignore_eos=False)
    assert ended.tokens == run.tokens[: run.tokens.index(run.tokens[4]) + 1]


def test_same_seed_same_bytes_and_tokenizer(tmp_path: Path) -> None:
    a, b, c = (
        build_model(tmp_path / name, arch="qwen3", layers=2, seed=seed)
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    weights = [(path / "model.safetensors").read_bytes() for path in (a, b, c)]
    assert weights[0] == weights[1] != weights[2]
    add_tokenizer(a, VOCAB)
    tokenizer = AutoTokenizer.from_pretrained(a)
    assert len(tokenizer) == VOCAB
    assert tokenizer.encode("w17 w3  w511") == [17, 3, 511]
    assert tokenizer.decode([17, 3, 511]) == "w17 w3 w511"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "w17 w3"}], return_dict=False)
    assert chat == [17, 3]

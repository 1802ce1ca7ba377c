"""What the tests of references share: models, prompts, and a forward pass under any mask.

The forward pass is transformers' own, layer by layer, and shares no code with the references.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from . import speed
from .fier import Retrieve
from .models import build_model
from .params import MODELS
from .structkv import Struct

# Of models; a module of tests may have another number under this name.
LAYERS, KV_HEADS, STEPS, VOCAB = 4, 2, 6, 512
# Rounding between two orders of the same float32 sums; engine tests have 1e-4.
ATOL = 1e-5
# A score gap that rounding cannot close: float64 moves scores by less than a tenth of it.
SAFE = 1e-4
# The least change of a logprob that counts as a change: a hundred times what engine tests allow.
CLEAR = 1e-2
# The paper's form of retention, unpooled; tests that are about pooling name the kernel.
paper = partial(Struct, kernel=1)
FIER = Retrieve(budget=20, group=8)
QUEST = Retrieve(budget=20, group=4, pages=True)
# Whether a row sees a column in a layer and query head: (layer, head, row, column).
Sees = Callable[[int, int, int, int], bool]


@pytest.fixture(scope="module", params=MODELS, ids=str)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedModel:
    arch, kv_heads = request.param
    path, layers = tmp_path_factory.mktemp(arch), getattr(request.module, "LAYERS", LAYERS)
    return speed.load(build_model(path, arch=arch, kv_heads=kv_heads, layers=layers))


@pytest.fixture(scope="module")
def llama(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedModel:
    path, layers = tmp_path_factory.mktemp("one"), getattr(request.module, "LAYERS", LAYERS)
    return speed.load(build_model(path, arch="llama", kv_heads=KV_HEADS, layers=layers))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def change(a: speed.Result, b: speed.Result) -> Tensor:
    """(S,) float32: largest difference of a logprob at each step."""
    return (a.logprobs - b.logprobs).abs().amax(dim=1)


@dataclass(frozen=True)
class Masked:
    """A forward pass over all tokens at once; lists are by layer."""

    logprobs: Tensor  # (n, V)
    probs: list[Tensor]  # (H, n, n)
    keys: list[Tensor]  # (G, n, D), rotated


@torch.no_grad()
def masked(model: PreTrainedModel, tokens: list[int], sees: Sees | None = None) -> Masked:
    """Causal attention where a row sees itself and those earlier columns that `sees` allows.

    Tokens that a method drops are computed too; nobody reads them.
    """
    heads, total = model.config.num_attention_heads, len(tokens)
    columns, positions, cache = range(total), torch.arange(total)[None], DynamicCache()
    hidden = model.model.embed_tokens(torch.tensor([tokens]))
    rotary = model.model.rotary_emb(hidden, positions)
    probs: list[Tensor] = []
    for index, layer in enumerate(model.model.layers):
        seen = [
            [
                [i == j or (i > j and (sees is None or sees(index, head, i, j))) for j in columns]
                for i in columns
            ]
            for head in range(heads)
        ]
        mask = torch.zeros(1, heads, total, total).masked_fill(~torch.tensor(seen), float("-inf"))
        hook = layer.self_attn.register_forward_hook(lambda *call: probs.append(call[2][1][0]))
        hidden = layer(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotary,
            past_key_values=cache,
        )
        hook.remove()
    return Masked(
        model.lm_head(model.model.norm(hidden))[0].log_softmax(dim=-1),
        probs,
        [layer.keys[0] for layer in cache.layers],
    )


def expected(
    model: PreTrainedModel,
    prompt: list[int],
    generated: list[int],
    retained: list[list[list[int]]],
    computed: list[list[int]] | None = None,
) -> speed.Result:
    """What `generated` was drawn from, by masks: prompt positions that KV heads retain, by layer.

    `computed`: prompt positions that each layer computes, which its prompt rows see; else all.
    """
    n = len(prompt)
    shared = model.config.num_attention_heads // model.config.num_key_value_heads

    def sees(layer: int, head: int, i: int, j: int) -> bool:
        if i < n:
            return computed is None or j in computed[layer]
        return j >= n or j in retained[layer][head // shared]

    logprobs = masked(model, prompt + generated[:-1], sees).logprobs[n - 1 :]
    return speed.Result(list(generated), logprobs)


def best(
    scores: Mapping[int, float], count: int, unpooled: Mapping[int, float] | None = None
) -> list[int]:
    """The `count` positions of the highest scores.

    Among equals those of the highest unpooled scores first, then lower positions.
    """
    peaks = unpooled or dict.fromkeys(scores, 0.0)
    return sorted(sorted(scores, key=lambda j: (-scores[j], -peaks[j], j))[:count])


def pooled(
    probs: Tensor, heads: Iterable[int], exist: list[int], window: int, kernel: int
) -> dict[int, float]:
    """Summed over `heads` after pooling each, the saliency of the positions before the window.

    probs (H, N, N) are of the whole prompt; `exist` are the positions that the layer computes.
    """
    table, scored, half = probs.tolist(), exist[:-window], kernel // 2
    total = dict.fromkeys(scored, 0.0)
    for head in heads:
        mass = [sum(table[head][i][j] for i in exist[-window:]) for j in scored]
        for k, j in enumerate(scored):
            total[j] += max(mass[max(0, k - half) : k + half + 1])
    return total


def snapkv(
    probs: Tensor, exist: list[int], cap: int, window: int, kernel: int, kv_heads: int
) -> list[list[int]]:
    """Positions that each KV head retains; arguments are as in `pooled`."""
    if len(exist) <= cap:
        return [exist] * kv_heads
    kept = []
    for heads in torch.arange(len(probs)).view(kv_heads, -1).tolist():
        scores = pooled(probs, heads, exist, window, kernel)
        unpooled = pooled(probs, heads, exist, window, 1)
        kept.append(best(scores, cap - window, unpooled) + exist[-window:])
    return kept

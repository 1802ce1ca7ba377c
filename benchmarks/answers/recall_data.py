"""Decode steps for the recall table, and lookups that read what retrieval selects.

No engine runs: the checkpoint runs in transformers, in float32, and what its attention reads is
chosen by ``vllm_kvx.equations.retrieval``, which the engine's kernels are tested against.
"""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from benchmarks.checkpoint.prompts import make_prompt, words
from vllm_kvx.equations import retrieval
from vllm_kvx.policy.retrieval_layers import OF_PAPERS

ANSWER_BUDGETS = (64, 128, 256, 512)
# Method and its group or page.
ANSWER_METHODS = (("fier", 32), ("fier", 128), ("quest", 16))
# Reduction of the reference math, and what products are multiplied with before. A policy's softmax
# is that of halved products.
REDUCTIONS: dict[str, tuple[str, float]] = {
    "max": ("max", 1),
    "sum": ("sum", 1),
    "softmax": ("softmax", 1 / retrieval.SOFTMAX_FACTOR),
    "softmax/2": ("softmax", 1),
}
# Method, group, reduction, budget.
Key = tuple[str, int, str, int]


@dataclass(frozen=True)
class Step:
    """One layer of one decode step: queries (H, D), keys (G, N, D) with the step's own as the last.

    sample: the prompt or draw that it belongs to; errors are those of means over samples.
    """

    sample: int
    query: Tensor
    keys: Tensor
    scaling: float


class Demo:
    """The demo checkpoint, whose decode steps are recorded, or read what retrieval selects."""

    def __init__(self, path: Path, length: int) -> None:
        self.length = length  # tokens of a prompt
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        loader: Any = AutoModelForCausalLM  # its type knows nothing of `dtype`
        self.model = loader.from_pretrained(path, dtype=torch.float32).eval()
        AttentionInterface.register("recall", self._attention)
        self.model.set_attn_implementation("recall")
        # Of the tokens that ran last with full attention, by layer: (H, N, D) and (G, N, D).
        self._queries: dict[int, Tensor] = {}
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        # What the sequences of a batch read; empty where all read everything, and are recorded.
        self._readings: list[Key | None] = []

    def steps(self, samples: int) -> Iterator[Step]:
        """Decode steps in layers from the third on.

        Answers are of three words, each of which the model looks up at the place of the one before.
        The first step is the last prompt token, which looks up the question's key.
        """
        for sample in range(samples):
            prompt, answer = make_prompt(sample, self.length, self.tokenizer, values=3)
            wanted = self.tokenizer.encode(answer, add_special_tokens=False)
            self._run([[*self.tokenizer.encode(prompt), *wanted]], 0)
            for layer in range(OF_PAPERS.dense, len(self.model.model.layers)):
                scaling = self.model.model.layers[layer].self_attn.scaling
                for known in range(self.length, self.length + len(wanted) + 1):
                    query, keys = self._queries[layer][:, known - 1], self._keys[layer][:, :known]
                    yield Step(sample, query, keys, scaling)

    def lookups(self, documents: int, questions: int) -> Iterator[dict[Key | None, bool]]:
        """Whether the answer to a question is right, by what its decode steps read; None is all.

        A document is a prompt of `steps`, of whose notes some are asked for in turn. Every step is
        given the right tokens so far, so an answer is right where the greedy one is, token by token
        up to the end of sequence. The last prompt token, the key asked for, reads everything.
        """
        readings: list[Key | None] = [None, *answer_keys()]
        for sample in range(documents):
            prompt = make_prompt(sample, self.length, self.tokenizer, values=3)[0]
            notes = re.findall(r"^- (\w+)((?: \w+){3}\.)$", prompt, re.MULTILINE)
            notes = [note for note in notes if note[0] in words()]
            *document, _ = self.tokenizer.encode(prompt)
            self._readings = []
            self._run([document], 0)
            self._readings = readings
            for note in random.Random(sample).sample(notes, questions):
                key, *wanted = self.tokenizer.encode(f" {''.join(note)}", add_special_tokens=False)
                found = self._run([[key, *wanted]] * len(readings), len(document))
                expected = torch.tensor([*wanted, self.tokenizer.eos_token_id])
                right = (found == expected).all(dim=1).tolist()
                yield dict(zip(readings, right, strict=True))

    @torch.no_grad()
    def _run(self, ids: list[list[int]], start: int) -> Tensor:
        """The most likely token after each of `ids` (B, n), the first at position `start`."""
        tokens = torch.tensor(ids)
        positions = torch.arange(start, start + tokens.shape[1])[None]
        out = self.model(tokens, position_ids=positions, use_cache=False)
        return out.logits.argmax(dim=-1)

    def _attention(self, module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **kw: Any) -> Any:
        layer, scaling = module.layer_idx, kw["scaling"]
        if self._readings:
            return self._read(layer, q, k, v, scaling), None
        self._queries[layer], self._keys[layer], self._values[layer] = q[0], k[0], v[0]
        # SDPA's own grouped-query path needs a full matrix in float32 on CPU.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out = scaled_dot_product_attention(q, k, v, scale=scaling, is_causal=True)
        return out.transpose(1, 2), None

    def _read(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Attention (B, n, H, D) of q (B, H, n, D): the last prompt token and the answer's."""
        rows, kv_heads = q.shape[2], k.shape[1]
        q = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3, 4)  # (G, H / G, B, n, D)
        shape = q.shape[:4]
        # The prompt's last token is the same in all sequences, as it reads everything in all.
        keys = torch.cat([self._keys[layer], k[0, :, :1]], dim=1)
        values = torch.cat([self._values[layer], v[0, :, :1]], dim=1)
        k, v = k[:, :, 1:], v[:, :, 1:]

        earlier = (q.flatten(1, 3) @ keys.mT).unflatten(1, shape[1:])  # (G, H / G, B, n, N)
        if layer >= OF_PAPERS.dense:
            seen = self._selected(q[..., 1:, :], keys, scaling)
            earlier[..., 1:, :].masked_fill_(~seen[:, None], -torch.inf)
        own = torch.einsum("ghbnd,bgmd->ghbnm", q, k)
        own.masked_fill_(torch.ones(rows, rows - 1).tril(-1) == 0, -torch.inf)
        probs = (torch.cat([earlier, own], dim=-1) * scaling).softmax(dim=-1)
        earlier, own = probs.tensor_split([keys.shape[1]], dim=-1)
        out = (earlier.flatten(1, 3) @ values).unflatten(1, shape[1:])
        out = out + torch.einsum("ghbnm,bgmd->ghbnd", own, v)
        return out.permute(2, 3, 0, 1, 4).flatten(2, 3)

    def _selected(self, query: Tensor, keys: Tensor, scaling: float) -> Tensor:
        """(G, B, n, N) bool, which of a prompt's N keys the n tokens after it read.

        query: (G, H / G, B, n, D). keys: (G, N, D). Of the answer they read every token so far.
        """
        kv_heads, length = keys.shape[:2]
        batch, rows = query.shape[2:4]
        seen = torch.ones(kv_heads, batch, rows, length, dtype=torch.bool)
        for method, group in ANSWER_METHODS:
            if retrieval.num_full_groups(length + rows, group) > length // group:
                raise ValueError(f"an answer to {length} tokens fills a group of {group}")
            mine = [b for b, key in enumerate(self._readings) if key and key[:2] == (method, group)]
            some = query[:, :, mine]
            products = score(some.flatten(0, 3), keys, method, group)
            products = products.unflatten(0, some.shape[:4]).flatten(0, 1)  # (H, b, n, units)
            for i, row in product(range(len(mine)), range(rows)):
                key = self._readings[mine[i]]
                assert key is not None
                reads = select(products[:, i, row], kv_heads, length + row + 1, scaling, key)
                for of_head, read in zip(seen[:, mine[i], row], reads, strict=True):
                    of_head.fill_(False)[read[read < length]] = True
        return seen


def answer_keys() -> list[Key]:
    """What lookups are answered with; a group larger than the budget is no policy."""
    every = product(ANSWER_METHODS, REDUCTIONS, ANSWER_BUDGETS)
    return [(*method, name, budget) for method, name, budget in every if method[1] <= budget]


def planted(samples: int, length: int, heads: int = 8, kv_heads: int = 2) -> Iterator[Step]:
    """Gaussian keys of 128 channels, in which every query head looks for 64 tokens of its own.

    Channels have offsets, and four of them are outliers: offsets of about 12 and four times the
    spread. Unrelated tokens get normal logits of a standard deviation around 1.2, which differs
    between heads; a token that is looked for gets 5 to 9 more. The heads of a KV head draw theirs
    from 128 tokens, so that they share half.
    """
    dim, outliers, wanted = 128, 4, 64
    share = heads // kv_heads
    for sample in range(samples):
        generator = torch.Generator().manual_seed(sample)

        def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(*shape, generator=generator)

        spread, offset = torch.ones(kv_heads, 1, dim), normal(kv_heads, 1, dim)
        for head in range(kv_heads):
            where = torch.randperm(dim, generator=generator)[:outliers]
            spread[head, 0, where] = 4
            offset[head, 0, where] = 12 * normal(outliers).sign()
        keys = normal(kv_heads, length, dim) * spread
        query = normal(heads, dim)
        pools = [torch.randperm(length, generator=generator)[: 2 * wanted] for _ in spread]
        for head in range(heads):
            group = head // share
            deviation = 1.2 * math.exp(0.3 * float(normal(1)))
            query[head] *= deviation * dim**0.5 / (query[head] * spread[group, 0]).norm()
            tokens = pools[group][torch.randperm(2 * wanted, generator=generator)[:wanted]]
            gain = 5 + 4 * torch.rand(wanted, 1, generator=generator)
            direction = query[head] / query[head].square().sum() * dim**0.5
            keys[group, tokens] += gain * direction
        yield Step(sample, query, keys + offset, dim**-0.5)


def score(query: Tensor, keys: Tensor, method: str, group: int) -> Tensor:
    """Products of query (H, D) with the 1-bit keys of all whole groups, or the pages' bounds.

    As ``retrieval.token_scores`` and ``page_scores``, which copy the keys for every query head.
    """
    whole = keys.shape[1] // group * group
    signs, *halves = retrieval.quantize_keys(keys[:, :whole], group)
    scales, zeros = (x.float() for x in halves)
    query = query.unflatten(0, (len(keys), -1))
    if method == "quest":
        return (query @ zeros.mT + query.abs() @ scales.mT).flatten(0, 1)
    scales, zeros = (x.repeat_interleave(group, dim=1) for x in (scales, zeros))
    return (query @ (zeros + scales * signs).mT).flatten(0, 1)


def select(products: Tensor, kv_heads: int, length: int, scaling: float, key: Key) -> list[Tensor]:
    """What each KV head reads of `length` keys, by products (H, units) of at least the full groups.

    The last of the keys is the step's own.
    """
    method, group, name, budget = key
    reduction, factor = REDUCTIONS[name]
    unit = 1 if method == "fier" else group
    products = products[:, : retrieval.num_full_groups(length, group) * group // unit]
    scores = retrieval.reduce_heads(products * factor, kv_heads, reduction, scaling)
    return [retrieval.select_units(row, length, group, unit, budget) for row in scores]

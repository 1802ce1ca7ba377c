"""A checkpoint whose attention is recorded, or reads what retrieval selects."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from benchmarks.answers.recall_data import REDUCTIONS, Key, score
from vllm_kvx.equations import retrieval
from vllm_kvx.policy.retrieval_layers import OF_PAPERS


def unit_scores(
    products: Tensor,
    kv_heads: int,
    first: int,
    length: int,
    key: tuple[str, int, str],
    scaling: float,
) -> Tensor:
    """What decode steps choose units by: (G, n, units), infinity in each step's newest group.

    Step i sees `first + i + 1` of `length` keys, its own the last; the others have minus infinity.

    Args:
        products: (H, n, whole units), see ``recall_data.score``. key: method, group and reduction.
    """
    method, group, name = key
    rows, whole = products.shape[1:]
    reduction, factor = REDUCTIONS[name]
    unit = 1 if method == "fier" else group
    # (n, 1) keys that each step sees, and of those the ones in full groups.
    seen = first + 1 + torch.arange(rows, device=products.device)[:, None]
    full = (seen - 1) // group * group
    index = torch.arange(-(-length // unit), device=products.device) * unit
    products = products.masked_fill(index[:whole] >= full, -torch.inf) * factor
    found = retrieval.reduce_heads(products, kv_heads, reduction, scaling)
    scores = torch.full((kv_heads, rows, len(index)), torch.inf, device=products.device)
    scores[..., :whole] = torch.where(index[:whole] < full, found, torch.inf)
    return scores.masked_fill(index >= seen, -torch.inf)


class Model:
    """A checkpoint, by its folder, with the hooks of this module in place of its attention."""

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        loader: Any = AutoModelForCausalLM  # its type knows nothing of `dtype`
        self.model = loader.from_pretrained(path, dtype=dtype).eval().to(device)
        AttentionInterface.register("recall_model", self._attention)
        self.model.set_attn_implementation("recall_model")
        # What runs in a layer: (layer, queries, keys, values, scaling) -> output.
        self._run: Callable[..., Tensor] = self._prompt
        # By layer (G, N, D): the prompt's, and after them those of the answer that is decoded.
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.queries: dict[int, list[Tensor]] = defaultdict(list)
        self.length = 0  # tokens of the prompt
        self._readings: Sequence[Key | None] = ()
        ends = self.model.generation_config.eos_token_id
        self.ends = {ends} if isinstance(ends, int) else set(ends or ())
        self.ends.add(self.tokenizer.eos_token_id)

    @property
    def layers(self) -> range:
        """Those that retrieve."""
        return range(OF_PAPERS.dense, len(self.model.model.layers))

    def scaling(self, layer: int) -> float:
        return float(self.model.model.layers[layer].self_attn.scaling)

    @torch.no_grad()
    def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy answer with full attention, without its end; the last token runs, too."""
        self.length = len(prompt)
        self.queries.clear()
        self._run = self._prompt
        token = self._next([list(prompt)], 0)
        self._run = self._decode
        tokens: list[int] = []
        while token not in self.ends and len(tokens) < max_tokens:
            tokens.append(token)
            token = self._next([[token]], self.length + len(tokens) - 1)
        return tokens

    @torch.no_grad()
    def read(self, tokens: Sequence[int], readings: Sequence[Key | None]) -> tuple[Tensor, Tensor]:
        """The answer again, whose steps read what `readings` select; None is everything.

        Returns:
            (B, n - 1) bool, whether each next token is the most likely one, and (B, n - 1), its
            log-probability.
        """
        self._run, self._readings = self._read, readings
        for kept in (self.keys, self.values):
            for layer, entries in kept.items():
                kept[layer] = entries[:, : self.length]
        logits = self._logits([list(tokens[:-1])] * len(readings), self.length, len(tokens) - 1)
        wanted = torch.tensor(tokens[1:], device=self.device)
        right, likely = [], []
        for of_reading in logits:
            right.append(of_reading.argmax(dim=-1) == wanted)
            of_reading = of_reading.float().log_softmax(dim=-1)
            likely.append(of_reading.gather(-1, wanted[:, None])[:, 0])
        return torch.stack(right).cpu(), torch.stack(likely).cpu()

    def _logits(self, ids: list[list[int]], start: int, keep: int) -> Tensor:
        tokens = torch.tensor(ids, device=self.device)
        positions = torch.arange(start, start + tokens.shape[1], device=self.device)[None]
        out = self.model(tokens, position_ids=positions, use_cache=False, logits_to_keep=keep)
        return out.logits

    def _next(self, ids: list[list[int]], start: int) -> int:
        return int(self._logits(ids, start, 1)[0, -1].argmax())

    def _attention(self, module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **kw: Any) -> Any:
        out = self._run(module.layer_idx, q, k, v, kw["scaling"])
        return out.transpose(1, 2).to(q.dtype), None

    def _prompt(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        self.keys[layer], self.values[layer] = k[0], v[0]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, scale=scaling, is_causal=True)

    def _decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        self.queries[layer].append(q[0])
        self.keys[layer] = torch.cat([self.keys[layer], k[0]], dim=1)
        self.values[layer] = torch.cat([self.values[layer], v[0]], dim=1)
        return _attend(q[0], self.keys[layer], self.values[layer], self._causal(1), scaling)[None]

    def _read(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        keys, values = self.keys[layer].float(), self.values[layer].float()
        causal = self._causal(q.shape[2], self.length)
        seen = [causal] * len(self._readings)
        if layer >= OF_PAPERS.dense:
            for b, reads in self._selected(q.float(), k.float(), keys, scaling):
                seen[b] = causal & reads
        out = torch.empty_like(q)
        for b, of_reading in enumerate(seen):
            every_key = torch.cat([keys, k[b].float()], dim=1)
            every_value = torch.cat([values, v[b].float()], dim=1)
            out[b] = _attend(q[b].float(), every_key, every_value, of_reading, scaling)
        return out

    def _selected(
        self, query: Tensor, own: Tensor, keys: Tensor, scaling: float
    ) -> Iterator[tuple[int, Tensor]]:
        """By sequence (G, n, N + n) bool: what its steps read, and perhaps more than they see.

        query: (B, H, n, D). own: (B, G, n, D), keys of the steps. keys: (G, N, D), the prompt's.
        """
        shape, (kv_heads, length) = query.shape, keys.shape[:2]
        for method, group in dict.fromkeys(key[:2] for key in self._readings if key):
            mine = [b for b, key in enumerate(self._readings) if key and key[:2] == (method, group)]
            whole = length // group * group
            earlier = query[mine].transpose(0, 1).flatten(0, 2)  # (H * b * n, D)
            earlier = score(earlier, keys[:, :whole], method, group)
            earlier = earlier.unflatten(0, (shape[1], len(mine), shape[2]))
            for i, b in enumerate(mine):
                key = self._readings[b]
                assert key is not None
                # Groups that the answer fills are quantised with its own keys.
                last = torch.cat([keys[:, whole:], own[b]], dim=1)
                later = score(query[b].flatten(0, 1), last, method, group)
                products = torch.cat([earlier[:, i], later.unflatten(0, shape[1:3])], dim=-1)
                total = length + shape[2]
                scores = unit_scores(products, kv_heads, length, total, key[:3], scaling)
                unit = 1 if method == "fier" else group
                best = scores.topk(min(key[3] // unit, scores.shape[-1]), dim=-1).indices
                reads = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
                yield b, reads.repeat_interleave(unit, dim=-1)[..., :total]

    def _causal(self, rows: int, first: int | None = None) -> Tensor:
        """(1, n, N) bool, what the last `rows` steps see; the newest key is the last one's."""
        if first is None:
            return torch.ones(1, 1, 1, dtype=torch.bool, device=self.device)
        index = torch.arange(first + rows, device=self.device)
        return (index <= index[first:, None])[None]


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scaling: float) -> Tensor:
    """Attention (H, n, D) of query (H, n, D) to those of keys (G, N, D) that are `seen`."""
    rows = query.shape[1]
    grouped = query.unflatten(0, (len(keys), -1)).flatten(1, 2)  # (G, H / G * n, D)
    logits = (grouped.float() @ keys.float().mT).unflatten(1, (-1, rows)) * scaling
    probs = logits.masked_fill_(~seen[:, None], -torch.inf).softmax(dim=-1)
    out = probs.flatten(1, 2) @ values.float()
    return out.unflatten(1, (-1, rows)).flatten(0, 1)

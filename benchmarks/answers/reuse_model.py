"""A checkpoint whose decode steps read what another layer or an earlier step chose.

A prompt is prefilled once, with full attention. Its answers, one for each way to choose, are the
rows of a batch: they share the prompt's keys and values, and each has those of its own tokens.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.answers.recall_attention import Model
from benchmarks.answers.reuse import RECENT, choices
from vllm_kvx.equations.retrieval import quantize_keys
from vllm_kvx.policy.retrieval_layers import OF_PAPERS

SPANNED = ("steps", "layers")
# Tokens that share a scale and a zero, `fier`'s default; the newest of them are always read.
GROUP = RECENT
ONE_BIT = "/1-bit"


@dataclass(frozen=True)
class Way:
    """Who chooses what a layer reads in a decode step; the first layers read everything.

    kind: `full` reads everything; `own` is a choice of the layer, KV head and step themselves;
    `steps` is that of the first of `span` steps, and all entries since; `layers` that of the first
    of `span` layers, by the same KV head. one_bit: whether scores are products with 1-bit keys, as
    `fier`'s are, and not with the keys themselves. budget: entries of a choice, the newest RECENT
    among them; 0 for `full`.
    """

    kind: str
    span: int = 1
    one_bit: bool = False
    budget: int = 0

    @classmethod
    def parse(cls, text: str, budget: int) -> "Way":
        """`full`, `own`, `steps:N` or `layers:N`, the last three also with `/1-bit`.

        Raises:
            ValueError: it is none of them, or N is no count.
        """
        kind, _, span = text.removesuffix(ONE_BIT).partition(":")
        if kind in SPANNED:
            known = span.isdecimal() and int(span) > 0
        else:
            known = text in ("full", "own", f"own{ONE_BIT}")
        if not known:
            raise ValueError(f"{text!r} is none of full, own, steps:N and layers:N")
        one_bit = text.endswith(ONE_BIT)
        return cls(kind, int(span or 1), one_bit, 0 if kind == "full" else budget)

    def __str__(self) -> str:
        span = f":{self.span}" if self.kind in SPANNED else ""
        return f"{self.kind}{span}{ONE_BIT if self.one_bit else ''}"

    def leader(self, layer: int) -> int:
        """The layer whose choice `layer` reads by."""
        return layer - (layer - OF_PAPERS.dense) % self.span if self.kind == "layers" else layer

    def chooses(self, layer: int, step: int) -> bool:
        """Whether a layer makes a choice in a step, the first after the prompt being 0."""
        if self.kind == "full" or layer < OF_PAPERS.dense:
            return False
        return self.leader(layer) == layer and (self.kind != "steps" or step % self.span == 0)


class ReuseModel(Model):
    """See the module. `answers` is the way in."""

    def __init__(self, path: Any, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(path, device, dtype)
        self.ways: Sequence[Way] = ()
        # What is decoded now: the step, and the rows of ways whose answers have not ended.
        self.step, self.rows = 0, list[int]()
        self.at = torch.empty(0, dtype=torch.long)  # those rows, on the device
        # By layer: (W, G, tokens, D) of the answers; and (W, G, N) bool, what is read: an entry
        # that comes after a choice is, until another choice is made.
        self.own_keys: dict[int, Tensor] = {}
        self.own_values: dict[int, Tensor] = {}
        self.reads: dict[int, Tensor] = {}
        # The prompt's whole groups as 1-bit keys say them, (G, n, D).
        self.coded: dict[int, Tensor] = {}

    @torch.inference_mode()
    def answers(
        self, prompt: Sequence[int], ways: Sequence[Way], max_tokens: int
    ) -> list[list[int]]:
        """The greedy answers by way, without their ends; all begin with the prompt's own token."""
        self.length, self.ways, self._run = len(prompt), ways, self._prompt
        first = self._next([list(prompt)], 0)
        self._make_room(max_tokens)
        self._run = self._by_ways
        said = [[first] for _ in ways]
        for self.step in range(max_tokens - 1):
            self.rows = [row for row, tokens in enumerate(said) if tokens[-1] not in self.ends]
            if not self.rows:
                break
            self.at = torch.tensor(self.rows, device=self.device)
            last = [said[row][-1:] for row in self.rows]
            logits = self._logits(last, self.length + self.step, 1)
            for row, token in zip(self.rows, logits[:, -1].argmax(dim=-1).tolist(), strict=True):
                said[row].append(token)
        return [[token for token in tokens if token not in self.ends] for tokens in said]

    def _make_room(self, tokens: int) -> None:
        """For answers of so many tokens to the prompt that was prefilled."""
        whole = self.length // GROUP * GROUP
        for layer, keys in self.keys.items():
            shape = len(self.ways), len(keys), tokens, keys.shape[-1]
            self.own_keys[layer], self.own_values[layer] = (keys.new_zeros(shape) for _ in range(2))
            read = torch.ones(*shape[:2], self.length + tokens, dtype=torch.bool)
            self.reads[layer] = read.to(self.device)
            if any(way.one_bit for way in self.ways):
                self.coded[layer] = as_coded(keys[:, :whole])

    def _by_ways(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Attention (B, H, 1, D) of the rows' queries to what they read."""
        end = self.step + 1
        self.own_keys[layer][self.at, :, self.step] = k[:, :, 0]
        self.own_values[layer][self.at, :, self.step] = v[:, :, 0]
        keys, values = self.keys[layer].float(), self.values[layer].float()
        own_keys, own_values = (
            own[layer][self.at, :, :end].float() for own in (self.own_keys, self.own_values)
        )
        query = q[:, :, 0].unflatten(1, (len(keys), -1)).float()  # (B, G, H / G, D)
        products = by_entry(query, keys, own_keys)
        if layer >= OF_PAPERS.dense:
            self._choose(layer, query, products, own_keys)
        read = self.reads[layer][self.at, :, : self.length + end]
        probs = (products * scaling).masked_fill(~read[:, :, None], -torch.inf).softmax(dim=-1)
        of_prompt, of_answer = probs.tensor_split([self.length], dim=-1)
        out = torch.einsum("bghn,gnd->bghd", of_prompt, values)
        out = out + torch.einsum("bghn,bgnd->bghd", of_answer, own_values)
        return out.flatten(1, 2)[:, :, None]

    def _choose(self, layer: int, query: Tensor, products: Tensor, own_keys: Tensor) -> None:
        """Brings what the rows read in this layer up to date."""
        reads, seen = self.reads[layer], products.shape[-1]
        choosing: dict[tuple[bool, int], list[int]] = defaultdict(list)
        for place, row in enumerate(self.rows):
            way = self.ways[row]
            if way.chooses(layer, self.step):
                choosing[way.one_bit, way.budget].append(place)
            elif way.leader(layer) != layer:
                reads[row] = self.reads[way.leader(layer)][row]
        for (one_bit, budget), places in choosing.items():
            mine = torch.tensor(places, device=self.device)
            scored = products[mine]
            if one_bit:
                scored = self._one_bit(layer, query[mine], own_keys[mine])
            # As `fier`'s `max`: what any of the query heads of a KV head looks for.
            score = scored.amax(dim=2)[:, :, None]
            reads[self.at[mine], :, :seen] = choices(score, seen - 1, budget)[:, :, 0]

    def _one_bit(self, layer: int, query: Tensor, own_keys: Tensor) -> Tensor:
        """Products with 1-bit keys; those of the newest group, which is read, are exact."""
        coded = self.coded[layer]
        last = self.keys[layer][:, coded.shape[1] :].float()
        # (B, G, n, D): what the answers' groups begin with is the prompt's end.
        last = torch.cat([last.expand(len(own_keys), -1, -1, -1), own_keys], dim=2)
        whole = last.shape[2] // GROUP * GROUP
        full = as_coded(last[:, :, :whole].flatten(0, 1)).unflatten(0, last.shape[:2])
        return by_entry(query, coded, torch.cat([full, last[:, :, whole:]], dim=2))


def as_coded(keys: Tensor) -> Tensor:
    """Keys (G, N, D) as their 1-bit form says them, in float32; N is whole groups."""
    signs, *halves = quantize_keys(keys, GROUP)
    scales, zeros = (x.float().repeat_interleave(GROUP, dim=1) for x in halves)
    return zeros + scales * signs


def by_entry(query: Tensor, shared: Tensor, own: Tensor) -> Tensor:
    """Products (B, G, H / G, N + n) of queries with keys (G, N, D) of all, then (B, G, n, D)."""
    first = torch.einsum("bghd,gnd->bghn", query, shared)
    return torch.cat([first, torch.einsum("bghd,bgnd->bghn", query, own)], dim=-1)

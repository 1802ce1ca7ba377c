"""Dense references of retention and retrieval on models of which only some layers are full.

A *full* layer has attention over all tokens, and follows the policy. A layer that slides sees the
last `window` tokens by position, whatever a policy drops elsewhere; a recurrent layer sees all
tokens. Both are the model's own. So prompt and generated tokens run together, in one forward of
transformers' model: a full layer reads its prompt rows causally, chooses from them what stays, and
lets every generated row see that, the generated rows before it and itself.

`score` has the signature of `fastkv.score`, `criticalkv.score`, `pyramidkv.score`, `knorm.score`
and `after.score`, told apart by the policy's class, and `read` that of `fier.score`:

    hybrid.score(model, prompt, generated, Keep(kv_rate=0.2)).argmax
    hybrid.read(model, prompt, generated, Retrieve(64), Keep(kv_rate=0.5)).clear_steps

They give what those give on a model whose layers are all full. `support.expected.expect` calls them
for hybrids, so tests name a policy as ever. Results list full layers only, from the lowest:
`full_layers(model)` says which they are. What is counted over layers is counted over those:
PyramidKV's budgets, and the dense layers below retrieval.

`cut` has the signature of `speed.score`. Above its cutoff, counted over all layers, a full layer
holds anchors, tail and generated tokens; a layer that slides holds no anchors, so rows of the tail
and above see nothing below the tail there. A recurrent layer above the cutoff is refused, and so
are token selection and SPEED with retention.

Weights of attention are the model's: its scale, its soft cap, and with a learned sink in the
denominator. The sink takes part of a row's weight, so rows that attend to it say less about keys.
1-bit scores and bounds are of products alone, as a soft cap does not change an order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import after, criticalkv, fastkv, knorm
from .after import After
from .criticalkv import Critical
from .fastkv import Keep, KeptResult, load
from .fier import Choice, Copies, ReadResult, Retrieve, choose, fill_holes
from .knorm import Norm
from .masked import Call, attention, causal, output_weight_of, run, text_config
from .pictures import seeing
from .pyramidkv import Pyramid
from .speed import Result

Policy = Keep | Critical | Pyramid | Norm | After
FULL = Keep()


def full_layers(model: PreTrainedModel) -> list[int]:
    """Indices of the layers with attention over all tokens, ascending."""
    return [layer for layer, window in _windows(model).items() if window is None]


def _windows(model: PreTrainedModel) -> dict[int, int | None]:
    """The window of each layer that has attention, by the layer's index; None for a full one."""
    found: dict[int, int | None] = {}

    def attend(call: Call) -> Tensor:
        found[call.layer] = call.window
        return torch.zeros_like(call.query)

    with torch.no_grad(), seeing(None):
        run(model, [3], attend)
    return found


def is_hybrid(model: PreTrainedModel) -> bool:
    """Whether some layer is not full."""
    return len(full_layers(model)) < text_config(model).num_hidden_layers


def score(
    model: str | Path | PreTrainedModel, prompt: list[int], generated: list[int], policy: Policy
) -> KeptResult:
    """The distributions that `generated` was drawn from, given these tokens."""
    model = load(model)
    layers = _Layers.of(model, len(prompt), policy)
    rows = _run(model, prompt, generated, layers)
    everything = list(range(len(prompt)))
    return KeptResult(list(generated), rows, layers.retained, everything, layers.slack)


def read(
    model: str | Path | PreTrainedModel,
    prompt: list[int],
    generated: list[int],
    retrieve: Retrieve,
    keep: Policy = FULL,
) -> ReadResult:
    """The same where decode steps read what `retrieve` chooses of what `keep` stores."""
    model = load(model)
    total = len(prompt)
    layers = _Layers.of(model, total, keep, retrieve)
    rows = _run(model, prompt, generated, layers)
    steps = [list(layer) for layer in zip(*layers.choices, strict=True)]
    slots = [[layers.slots(head) for head in heads] for heads in layers.retained]
    return ReadResult(
        list(generated), rows, layers.retained, list(range(total)), layers.slack, slots, steps
    )


def cut(
    model: str | Path | PreTrainedModel,
    prompt: list[int],
    generated: list[int],
    *,
    cutoff: int | None,
    anchors: int = 1,
    tail: int = 1,
) -> Result:
    """The distributions that `generated` was drawn from under SPEED, given these tokens.

    Raises ValueError where a layer at `cutoff` or above has no attention.
    """
    model = load(model)
    attending = set(_windows(model))
    recurrent = [i for i in range(text_config(model).num_hidden_layers) if i not in attending]
    if cutoff is not None and recurrent and recurrent[-1] >= cutoff:
        raise ValueError(f"cutoff={cutoff} must be above the recurrent layer {recurrent[-1]}")
    total, count = len(prompt), len(prompt) + len(generated) - 1
    positions = torch.arange(count)
    is_anchor = positions < min(anchors, total - tail)
    is_last = positions >= total - tail

    def attend(call: Call) -> Tensor:
        seen = causal(count, count)
        if call.window is not None:
            seen = seen.triu(1 - call.window)
        if cutoff is not None and call.layer >= cutoff:
            seen &= is_anchor | is_last
            if call.window is not None:
                seen[total - tail :] &= is_last
            # Rows that do not exist see themselves, and nobody sees them.
            seen |= torch.eye(count, dtype=torch.bool)
        return read_rows(call, slice(0, count), seen)[0]

    with torch.no_grad():
        rows = run(model, prompt + generated[:-1], attend, last=len(generated))
    return Result(list(generated), rows)


# Of a full layer, by its index among full layers: rows (G, kept) int64 ascending of the prompt, and
# of generated tokens that retention waits for, that each KV head retains, and the slack of the
# choice. From the call, whose tensors are of these P tokens alone, and its weights (H, P, P).
Retains = Callable[[int, Call, Tensor], tuple[Tensor, float]]


def _retains(policy: Policy, count: int, total: int) -> Retains:
    """What `policy` retains of `total` prompt tokens in `count` full layers."""
    propagates = f"{policy} propagates, which no reference has for hybrids"
    if isinstance(policy, After):
        if policy.propagates is not None:
            raise ValueError(propagates)
        by_layer = policy.caps(count, total)
        return lambda index, call, probs: after.retain(
            policy,
            by_layer[index],
            probs,
            call.value,
            output_weight_of(call.module),
            total + policy.after,
        )
    if isinstance(policy, Critical):
        if policy.tsp_layer is not None:
            raise ValueError(propagates)
        return lambda _, call, probs: criticalkv.retain(
            probs, call.value, output_weight_of(call.module), total, policy
        )
    if isinstance(policy, Norm):
        return lambda _, call, _probs: knorm.retain(call.key, total, policy)
    if not isinstance(policy, (Keep, Pyramid)):
        raise ValueError(propagates)
    positions = torch.arange(total)
    if isinstance(policy, Pyramid):
        if policy.score == "critical":
            by_values = [
                Critical(kv_budget=cap, window=policy.window, kernel=policy.kernel)
                for cap in policy.caps(count, total)
            ]
            return lambda index, call, probs: criticalkv.retain(
                probs, call.value, output_weight_of(call.module), total, by_values[index]
            )
        caps = policy.caps(count, total)
        window, kernel = policy.window, policy.kernel
        each = [Keep(kv_budget=cap, window=window, kernel=kernel) for cap in caps]
    else:
        if policy.tsp_layer is not None or policy.cutoff is not None:
            raise ValueError(propagates)
        each = [policy] * count
    return lambda index, call, probs: fastkv.retain(
        probs, call.key.shape[0], positions, total, each[index]
    )


def _run(
    model: PreTrainedModel, prompt: list[int], generated: list[int], layers: "_Layers"
) -> Tensor:
    """(S, V) log-softmax of the rows whose next tokens are `generated`."""
    with torch.no_grad():
        return run(model, prompt + generated[:-1], layers.attend, last=len(generated))


@dataclass
class _Layers:
    """What full layers did, each after the one below it."""

    total: int  # prompt tokens
    retains: Retains
    retrieve: Retrieve | None = None
    waits: int = 0  # for so many generated tokens
    retained: list[list[list[int]]] = field(default_factory=list)
    choices: list[list[list[Choice]]] = field(default_factory=list)  # [layer][step][KV head]
    slack: float = float("inf")
    # [step][KV head] entries that the last layer chose which does so for others, too.
    read: list[list[Tensor]] = field(default_factory=list)

    @classmethod
    def of(
        cls, model: PreTrainedModel, total: int, policy: Policy, retrieve: Retrieve | None = None
    ) -> "_Layers":
        waits = policy.after if isinstance(policy, After) else 0
        return cls(total, _retains(policy, len(full_layers(model)), total), retrieve, waits)

    def slots(self, retained: list[int]) -> list[int]:
        """Ascending positions in the order of their slots."""
        return fill_holes(retained, list(range(self.total + self.waits)))

    def attend(self, call: Call) -> Tensor:
        count = call.query.shape[1]
        if call.window is not None:
            seen = causal(count, count).triu(1 - call.window)
            return read_rows(call, slice(0, count), seen)[0]
        total, index, settles_at = self.total, len(self.retained), self.total + self.waits
        first = min(settles_at, count)
        mixed, probs = read_rows(call, slice(0, first), causal(first, first))
        rows = torch.arange(first).expand(call.key.shape[0], -1)
        if first == settles_at:
            settled = Call(
                call.module,
                call.layer,
                *(x[:, :first] for x in (call.query, call.key, call.value)),
                call.scale,
                call.window,
                call.softcap,
                call.sinks,
            )
            rows, slack = self.retains(index, settled, probs)
            self.slack = min(self.slack, slack)
        self.retained.append(rows.tolist())
        if self.retrieve is not None:
            everything = [list(range(total))] * len(rows)
            slots = [self.slots(head) for head in rows.tolist()]
            steps = list[list[Choice]]()
            waiting = self._chosen(call, index, everything, range(total, first), steps)
            others = self._chosen(call, index, slots, range(first, count), steps)
            self.choices.append(steps)
            return torch.cat([mixed[:, :total], waiting, others], dim=1)
        kept = torch.zeros(len(rows), 1, first, dtype=torch.bool)
        kept.scatter_(2, rows[:, None], True)
        new = count - first
        seen = torch.cat(
            [kept.expand(-1, new, -1), causal(new, new).expand(len(rows), -1, -1)], dim=2
        ).repeat_interleave(call.query.shape[0] // len(rows), 0)
        return torch.cat([mixed, read_rows(call, slice(first, count), seen)[0]], dim=1)

    def _chosen(
        self,
        call: Call,
        index: int,
        slots: list[list[int]],
        rows: range,
        steps: list[list[Choice]],
    ) -> Tensor:
        """What generated rows read (H, n, D), by `retrieve` above the first full layers.

        slots: by KV head, positions of what is stored of the tokens before these rows.
        """
        assert self.retrieve is not None
        budgeted = self.retrieve if index >= self.retrieve.dense_layers else None
        above = index - self.retrieve.dense_layers
        chooses = above <= 0 or above % self.retrieve.reuse_layers == 0
        if chooses and not steps:
            self.read.clear()
        heads = [torch.tensor(head) for head in slots]
        shared = call.query.shape[0] // len(heads)
        copies: list[Copies] = [{} for _ in heads]
        out = call.query.new_zeros(call.query.shape[0], 0, call.value.shape[2])
        for row in rows:
            steps.append([])
            if chooses:
                self.read.append([])
            seen = torch.zeros(len(heads), 1, call.key.shape[1], dtype=torch.bool)
            for head, stored in enumerate(heads):
                of = torch.cat([stored, torch.arange(rows.start, row + 1)])
                queries = call.query[head * shared : (head + 1) * shared, row]
                keys, known = call.key[head, of], copies[head]
                if chooses:
                    entries, margin, slack = choose(queries, keys, budgeted, call.scale, known)
                    self.read[-1].append(entries)
                else:
                    # The margins of a choice count once, where it is made.
                    entries, margin, slack = self.read[len(steps) - 1][head], *[float("inf")] * 2
                positions = of[entries].sort().values
                steps[-1].append(Choice(entries.tolist(), positions.tolist(), margin, slack))
                seen[head, 0, positions] = True
            seen = seen.repeat_interleave(shared, 0)
            out = torch.cat([out, read_rows(call, slice(row, row + 1), seen)[0]], dim=1)
        return out


def read_rows(call: Call, rows: slice, seen: Tensor) -> tuple[Tensor, Tensor]:
    """`masked.attention` of some rows over the first tokens, as many as `seen` has columns."""
    upto = slice(0, seen.shape[-1])
    key, value = call.key[:, upto], call.value[:, upto]
    return attention(call.query[:, rows], key, value, call.scale, seen, call.softcap, call.sinks)

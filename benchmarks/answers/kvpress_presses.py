"""kvpress' presses on one prefill: what each keeps of a prompt, and what the model then answers.

A press does not change what prefill computes: it chooses entries once a layer's attention is done,
or by further passes over the whole cache (KVzip). So each prompt is prefilled once, every press
compresses the same keys and values, and the caches are decoded together as one batch. The presses
are kvpress' own, but for those named `our-...`, which score as this project does: they tell a
difference between two programs from one between two scores. kvpress' SnapKV takes means where ours
takes maxima of neighbours and sums.
"""

import importlib
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FULL = "full"
WINDOW, KERNEL = 8, 7  # The papers' and this project's; kvpress has 64 and 5.


def load_kvpress() -> ModuleType:
    """kvpress; where one of its needs that no press here uses is missing, a stand-in for that.

    kvpress imports `datasets` and `requests` for presses that fetch statistics.
    """
    import transformers  # It looks for `datasets` and must not see the stand-in.

    stand_ins = []
    for name, attribute in (("datasets", "load_dataset"), ("requests", "get")):
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = ModuleType(name)
            setattr(sys.modules[name], attribute, None)
            stand_ins.append(name)
    try:
        kvpress = importlib.import_module("kvpress")
    except ImportError as error:
        sys.exit(
            f"kvpress cannot be imported: {error}\n"
            "pip install --no-deps kvpress cachetools fire termcolor"
        )
    finally:
        for name in stand_ins:
            del sys.modules[name]
    logging.getLogger("kvpress").setLevel(logging.ERROR)  # Each KVzip press warns that it is slow.
    # KVzip loads the tokenizer for every prompt.
    load = cache(transformers.AutoTokenizer.from_pretrained)
    kvzip: Any = importlib.import_module("kvpress.presses.kvzip_press")
    kvzip.AutoTokenizer = SimpleNamespace(from_pretrained=load)
    return kvpress


# What makes a press. The budget is set for each prompt.
Maker = Callable[[], Any]


@cache
def presses() -> dict[str, Maker]:
    """Every press by name. `our-` marks those that score as this project does."""
    kv: Any = load_kvpress()

    class OurSnap(kv.SnapKVPress):
        """This project's saliency: fp32 rows summed, then max-pooled, then summed over heads.

        Means in place of the sums keep the order, and kvpress' scale, which CriticalKV needs.
        """

        def score(  # type: ignore[no-untyped-def]
            self, module, hidden_states, keys, values, attentions, kwargs
        ) -> Tensor:
            # [1, H, w, N - w], the rows normalised over all N keys.
            rows = self.compute_window_attention(
                module,
                hidden_states,
                keys.float(),
                self.window_size,
                tuple(part.float() for part in kwargs["position_embeddings"]),
            )
            pooled = F.max_pool1d(rows.mean(-2), self.kernel_size, 1, self.kernel_size // 2)
            scores = pooled.unflatten(1, (keys.shape[1], -1)).mean(2)  # [1, G, N - w]
            return F.pad(scores, (0, self.window_size), value=scores.max().item() + 1)

    def snapkv(window: int = WINDOW, kernel: int = KERNEL) -> Any:
        return kv.SnapKVPress(window_size=window, kernel_size=kernel)

    def ours(window: int = WINDOW) -> Any:
        return OurSnap(window_size=window, kernel_size=KERNEL)

    return {
        "snapkv": snapkv,
        "streamingllm": kv.StreamingLLMPress,
        "knorm": kv.KnormPress,
        "pyramidkv": lambda: kv.PyramidKVPress(window_size=WINDOW, kernel_size=KERNEL),
        "snapkv-defaults": lambda: kv.SnapKVPress(),
        "ada": lambda: kv.AdaKVPress(snapkv()),
        "critical": lambda: kv.CriticalKVPress(snapkv()),
        "critical-ada": lambda: kv.CriticalAdaKVPress(snapkv()),
        "our-snapkv": ours,
        "our-ada": lambda: kv.AdaKVPress(ours()),
        "our-critical": lambda: kv.CriticalKVPress(ours()),
        "our-critical-ada": lambda: kv.CriticalAdaKVPress(ours()),
        "snapkv-window-16": lambda: snapkv(16),
        "snapkv-window-32": lambda: snapkv(32),
        "our-window-16": lambda: ours(16),
        "our-window-32": lambda: ours(32),
        "tova": kv.TOVAPress,
        # Epsilon as in kvpress' own evaluation of it.
        "expected": lambda: kv.ExpectedAttentionPress(epsilon=1e-2),
        "expected-ada": lambda: kv.AdaKVPress(kv.ExpectedAttentionPress(epsilon=1e-2)),
        "kvzip": kv.KVzipPress,
        "kvzip-plus": lambda: kv.KVzipPress(kvzip_plus_normalization=True),
        "kvzip-layerwise": lambda: kv.KVzipPress(layerwise=True),
        "kvgrad": kv.KVgradPress,
    }


# Of a layer: keys and values, each [1, G, n, head size], and (batch, head, place) of the entries
# that attention must not see, None for none.
Layer = tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None]


@dataclass
class Kept:
    """What one press at one budget keeps of one prompt, layer by layer."""

    layers: list[Layer] = field(default_factory=list)

    def entries(self) -> float:
        """Entries that attention reads, per layer and KV head on average."""
        total = sum(keys.shape[1] * keys.shape[2] for keys, _, _ in self.layers)
        hidden = sum(len(masked[0]) for _, _, masked in self.layers if masked is not None)
        return (total - hidden) / sum(keys.shape[1] for keys, _, _ in self.layers)


def without_hidden(
    keys: Tensor, values: Tensor, hidden: tuple[Tensor, Tensor, Tensor] | None
) -> Layer:
    """The entries of a layer that attention sees, in order, as many as the fullest head has.

    hidden: `masked_key_indices` of kvpress: presses with a budget per head hide entries and remove
    none. What other heads have fewer stays hidden.
    """
    if hidden is None:
        return keys, values, None
    _, heads, size, width = keys.shape
    seen = torch.ones(heads, size, dtype=torch.bool, device=keys.device)
    seen[hidden[1].to(keys.device), hidden[2].to(keys.device)] = False
    counts = seen.sum(-1)
    longest = int(counts.max())
    order = seen.byte().argsort(dim=-1, descending=True, stable=True)[:, :longest]  # [G, longest]
    taken = order[None, :, :, None].expand(-1, -1, -1, width)
    unused = torch.arange(longest, device=keys.device) >= counts[:, None]
    head, place = unused.nonzero(as_tuple=True)
    masked = (torch.zeros_like(head), head, place) if len(head) else None
    return keys.gather(2, taken), values.gather(2, taken), masked


@contextmanager
def compressing(model: Any, cells: dict[str, Any]) -> Iterator[dict[str, Kept]]:
    """Within, a prefill fills one `Kept` per press in `cells`; its own cache stays whole."""
    kept = {name: Kept() for name in cells}

    def after_attention(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        for name, press in cells.items():
            module.masked_key_indices = None
            # Of the attention weights, sdpa returns none.
            keys, values = press.compress(
                module, kwargs["hidden_states"], layer.keys, layer.values, None, kwargs
            )
            kept[name].layers.append(without_hidden(keys, values, module.masked_key_indices))
        module.masked_key_indices = None

    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(after_attention, with_kwargs=True))
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def replaying(model: Any, ids: Tensor, past: Any, cells: dict[str, Any]) -> dict[str, Kept]:
    """What presses keep that replay a prompt over its whole cache, as KVzip does.

    ids: [1, N]. past: their cache, whole again afterwards. A press at several budgets replays once:
    its scores do not depend on them.
    """
    kept = {name: Kept() for name in cells}
    of_press: dict[str, list[str]] = defaultdict(list)
    for name in cells:
        of_press[name.rsplit(" ", 1)[0]].append(name)
    for names in of_press.values():
        press = cells[names[0]]
        choose = press.compress_post

        def every_budget(
            model: Any, press: Any = press, choose: Any = choose, names: list[str] = names
        ) -> None:
            for name in names:
                press.compression_ratio = cells[name].compression_ratio
                choose(model)
                for layer, cached in zip(model.model.layers, past.layers, strict=True):
                    hidden = layer.self_attn.masked_key_indices
                    kept[name].layers.append(without_hidden(cached.keys, cached.values, hidden))
                    layer.self_attn.masked_key_indices = None

        press.compress_post = every_budget
        with press(model):
            # What it would note of a prefill in here; the one that all presses share is over.
            press._context_ids, press._cache = ids, past
    return kept


def batched(model: Any, batch: list[Kept]) -> Any:
    """The caches of several presses as one, of as many entries as the greatest in each layer.

    What a smaller one lacks is filled up and hidden in the way that kvpress hides entries: its
    patched attention gives the places in `masked_key_indices` keys of no weight.
    """
    from transformers import DynamicCache

    past = DynamicCache()
    for index, layer in enumerate(model.model.layers):
        longest = max(kept.layers[index][0].shape[2] for kept in batch)
        filled: list[tuple[Tensor, Tensor]] = []
        masked: list[tuple[Tensor, ...]] = []
        for number, kept in enumerate(batch):
            keys, values, found = kept.layers[index]
            _, heads, size, _ = keys.shape
            lack = longest - size
            filled.append((F.pad(keys, (0, 0, 0, lack)), F.pad(values, (0, 0, 0, lack))))
            if found is not None:
                masked.append((found[0] + number, found[1], found[2]))
            if lack:
                of_head = torch.arange(heads).repeat_interleave(lack)
                places = torch.arange(size, longest).repeat(heads)
                masked.append((torch.full_like(places, number), of_head, places))
        keys, values = (torch.cat(parts) for parts in zip(*filled, strict=True))
        past.update(keys, values, index)
        layer.self_attn.masked_key_indices = (
            tuple(
                torch.cat([part.to(keys.device) for part in parts])
                for parts in zip(*masked, strict=True)
            )
            if masked
            else None
        )
    return past


def decode(
    model: Any, batch: list[Kept], first: int, position: int, max_tokens: int, stop: set[int]
) -> list[list[int]]:
    """Greedy answers over the caches of several presses, all at once.

    first: the answer's first token, which prefill gave. position: where it stands.
    """
    past = batched(model, batch)
    answers = [[first] for _ in batch]
    try:
        for step in range(max_tokens - 1):
            if all(answer[-1] in stop for answer in answers):
                break
            logits = model(
                input_ids=torch.tensor([answer[-1:] for answer in answers], device=model.device),
                past_key_values=past,
                position_ids=torch.full((len(batch), 1), position + step, device=model.device),
            ).logits
            for answer, token in zip(answers, logits[:, -1].argmax(-1).tolist(), strict=True):
                answer.append(answer[-1] if answer[-1] in stop else token)
    finally:
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None
    return answers


@dataclass
class Answered:
    """tokens: the answer. entries: kept per layer and KV head, on average."""

    tokens: list[int]
    entries: float


def answer_all(
    model: Any, token_ids: list[int], names: Iterable[str], max_tokens: int, stop: set[int]
) -> dict[str, Answered]:
    """What the model answers under every press and budget of `names`, and with all entries."""
    from transformers import DynamicCache

    kvzip = load_kvpress().KVzipPress
    length = len(token_ids)
    at_once, replays = dict[str, Any](), dict[str, Any]()
    for name in names:
        kind, budget = name.rsplit(" ", 1)
        press = presses()[kind]()
        # The middle between two counts, so that kvpress' rounding gives int(N * rate), as ours.
        press.compression_ratio = 1 - (int(length * float(budget)) + 0.5) / length
        (replays if isinstance(press, kvzip) else at_once)[name] = press
    past: Any = DynamicCache()
    ids = torch.tensor([token_ids], device=model.device)
    with compressing(model, at_once) as kept:
        logits = model(input_ids=ids, past_key_values=past, logits_to_keep=1).logits
    first = int(logits[0, -1].argmax())
    kept |= replaying(model, ids, past, replays)
    kept[FULL] = Kept([(layer.keys, layer.values, None) for layer in past.layers])
    entries = {name: of_press.entries() for name, of_press in kept.items()}
    answers: dict[str, list[int]] = {}
    # All entries alone: the others have far fewer.
    waiting = [[name for name in kept if name != FULL], [FULL]]
    while waiting:
        together = waiting.pop()
        if not together:
            continue
        some = [kept[name] for name in together]
        try:
            found = decode(model, some, first, length, max_tokens, stop)
        except ValueError:
            # kvpress found no key that every query head ignores, in some of these.
            if len(together) > 1:
                half = len(together) // 2
                waiting += [together[:half], together[half:]]
            continue
        answers.update(zip(together, found, strict=True))
    return {name: Answered(tokens, entries[name]) for name, tokens in answers.items()}

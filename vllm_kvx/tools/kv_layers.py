"""What share of a model's KV its policy layers hold: the most of it that a policy can save."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm_kvx.config.policy_layers import is_full, layer_kinds, own_configs

# What configurations call layers that hold nothing of a prompt.
NOTHING = ("mlp", "moe")


@dataclass(frozen=True)
class KVLayers:
    """A model's layers by what they hold of a prompt, where not all have full attention alone.

    total: layers. full: those with full attention, which policies are about. sliding: those that
    hold the last `window` tokens. recurrent: those that keep a state, whatever the prompt, alone or
    beside full attention. state_entries: what one request's states take in all of these together,
    in the bytes of a token in one layer; None if that is not known. window_entry: how large an
    entry of a layer that slides is, over one of a layer with full attention.
    """

    total: int
    full: int
    sliding: int
    recurrent: int
    window: int
    state_entries: float | None = None
    window_entry: float = 1

    @classmethod
    def of(cls, text_config: Any, state_entries: float | None = None) -> "KVLayers | None":
        """The layers of this configuration; None if all are alike, or it has no list of them.

        text_config: of the language model, as transformers or config.json has it. state_entries:
        as the class has it.
        """
        if isinstance(text_config, Mapping):
            text_config = SimpleNamespace(**text_config)
        kinds = layer_kinds(text_config)
        full = sum(map(is_full, kinds))
        sliding = sum("sliding" in kind for kind in kinds)
        others = [kind for kind in kinds if not is_full(kind) and "sliding" not in kind]
        recurrent = sum(kind not in NOTHING for kind in others) + kinds.count("hybrid")
        if not full or (full == len(kinds) and not recurrent):
            return None
        window = getattr(text_config, "sliding_window", None) or 0
        sizes = [_values(text_config, layer) for layer in range(len(kinds))]
        of_full = next(size for size, kind in zip(sizes, kinds, strict=True) if is_full(kind))
        of_sliding = [size for size, kind in zip(sizes, kinds, strict=True) if "sliding" in kind]
        ratio = of_sliding[0] / of_full if of_sliding and of_full else 1
        return cls(len(kinds), full, sliding, recurrent, window, state_entries, ratio)

    def other_entries(self, prompt_len: int) -> float:
        """What the others hold of such a prompt, in tokens of one layer; known states included."""
        windows = self.sliding * min(prompt_len, self.window) * self.window_entry
        return windows + (self.state_entries or 0)

    def share(self, prompt_len: int) -> float:
        """The share of the KV of such a prompt that layers with full attention hold, in [0, 1]."""
        own = self.full * prompt_len
        return own / (own + self.other_entries(prompt_len))

    def says(self, prompt_len: int, kept: float) -> str:
        """The share in words, and what a policy saves that keeps the share `kept` of its entries.

        kept: in [0, 1].
        """
        share = self.share(prompt_len)
        words = (
            f"full attention in {self.full} of {self.total} layers, which hold {share:.0%} of the "
            f"KV of {prompt_len:,} tokens{self._left_out()}: "
        )
        if kept >= 1:
            return words + f"a policy saves at most {share:.0%}"
        return words + f"a policy that keeps {kept:.0%} there saves {share * (1 - kept):.0%} of it"

    def bounds(self, lengths: Sequence[int]) -> str:
        """The most that policies save which only retain or retrieve, at each of these lengths."""
        shares = " and ".join(f"{self.share(each):.0%} at {each:,} tokens" for each in lengths)
        return (
            f"kept and read are of the {self.full} of {self.total} layers that have full "
            f"attention. They hold {shares} of the model's KV{self._left_out()}: no policy that "
            "only retains or retrieves saves more."
        )

    def _left_out(self) -> str:
        counted = not self.recurrent or self.state_entries is not None
        return "" if counted else " (the states of the others are not counted)"


def _values(text_config: Any, layer: int) -> int:
    """Numbers of a key in the cache of a layer; the same of all, where layers are not told apart.

    Where they are, as Gemma 4's, config.json has what differs, and transformers a configuration of
    each.
    """
    if (configs := own_configs(text_config)) is not None:
        found = configs[layer].to_dict()
    elif isinstance(own := getattr(text_config, "per_layer_config", None), Mapping):
        # Keys are numbers with zeros before them.
        mine = (fields for key, fields in own.items() if int(key) == layer)
        found = {**vars(text_config), **next(mine, {})}
    else:
        return 1
    return int(found["num_key_value_heads"] * found["head_dim"])

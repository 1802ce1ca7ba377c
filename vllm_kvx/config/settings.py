"""What a server's policy is: read from vLLM's configuration, in any of its processes.

``additional_config`` carries these keys of ours, all plain JSON:

kv_policy: the policy of every request that does not name one. The others need it.
kv_layout: a list of further policies that the server makes room for.
kv_request_policies: what requests may name: "off", nothing but the server's policy; "layout" (the
    default), any policy that fits; "list", those in kv_policy and kv_layout.
kv_stash_tokens: how many prompt tokens the stash holds, which wait there until the last chunk of
    their prompt selects some (default: --max-model-len plus --max-num-batched-tokens).
kv_share: "on" (the default) or "off": whether prompts whose entries go once they are in read
    prefixes from vLLM's prefix cache and stay in it.
kv_eviction: which cached blocks go where the cache cannot hold all that come back: "adaptive" (the
    default; see ``cache/prefix_eviction.py``) or "lru", as vLLM does.
kv_recall_every: of the steps that retrieve, every n-th measures recall (default 0, none).
kv_disable: a list of parts that do not run: "split_layers" (see ``worker/split_layers.py``),
    "compiled_ranges" (see ``models/compiled_ranges.py``).
kv_debug: whether scheduler and worker compare their block counts in every step (default false).
kv_auto: internal. The server says here for which `auto` it chose the policy in kv_policy, and why
    (``server/auto_policy.py``).
kv_text_alone: internal. The server says here why it serves the text alone of a model that also
    reads images (``server/text_alone.py``).
kv_measured: internal. The server hands the layers that it found for ``tsp_layer=auto`` and
    ``pivot=calibrated`` to its processes here (``server/measured_layers.py``): an object of
    parameters and their values.
kv_drafts: internal. What method ``kvx`` of ``--speculative-config`` says: see ``config/drafts.py``.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from vllm_kvx.config.disabled import DISABLE_KEY, disabled_parts
from vllm_kvx.config.drafts import DRAFTS_KEY, Drafts
from vllm_kvx.config.environment import refuse_replaced
from vllm_kvx.config.measured import MEASURED_KEY, Measured
from vllm_kvx.config.policy_layers import num_policy_layers, windows_of
from vllm_kvx.config.server_layout import on_server
from vllm_kvx.config.spelling import POLICY_KEY as POLICY_KEY
from vllm_kvx.config.spelling import has_prefix, misspelling
from vllm_kvx.policy.counted import CountedPolicies
from vllm_kvx.policy.layout import Layout, layout_of
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import check_served, parse_policy
from vllm_kvx.policy.windows import Windows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

LAYOUT_KEY = "kv_layout"
REQUESTS_KEY = "kv_request_policies"
STASH_KEY = "kv_stash_tokens"
DEBUG_KEY = "kv_debug"
RECALL_KEY = "kv_recall_every"
SHARE_KEY, EVICTION_KEY = "kv_share", "kv_eviction"
AUTO_KEY, TEXT_ALONE_KEY = "kv_auto", "kv_text_alone"
KEYS = (
    *(POLICY_KEY, LAYOUT_KEY, STASH_KEY, MEASURED_KEY, AUTO_KEY, TEXT_ALONE_KEY, DISABLE_KEY),
    *(DEBUG_KEY, RECALL_KEY, SHARE_KEY, EVICTION_KEY, REQUESTS_KEY, DRAFTS_KEY),
)
# A server sets these for its own processes; messages list the others, which users set.
INTERNAL_KEYS = (MEASURED_KEY, AUTO_KEY, TEXT_ALONE_KEY, DRAFTS_KEY)
PUBLIC_KEYS = tuple(key for key in KEYS if key not in INTERNAL_KEYS)
# Keys of earlier versions, and the parameter of a policy that says the same.
REPLACED_KEYS = {
    f"kv_{parameter}": f"{name}:{parameter}"
    for name, method in METHODS.items()
    if method.to_measure is not None
    for parameter in (method.to_measure.parameter, method.to_measure.reduction)
    if parameter
}
# What REQUESTS_KEY may be.
NO_POLICY, ANY_THAT_FITS, THOSE_NAMED = "off", "layout", "list"
REQUEST_POLICIES = (NO_POLICY, ANY_THAT_FITS, THOSE_NAMED)
# What SHARE_KEY and EVICTION_KEY may be.
SHARES = ("on", "off")
EVICTIONS = ("adaptive", "lru")


@lru_cache(maxsize=1024)
def _parse(name: str, measured: Measured, windows: Windows | None) -> KVPolicy:
    return replace(KVPolicy.of(map(measured.put_into, parse_policy(name).parts)), windows=windows)


@dataclass(frozen=True)
class KVSettings:
    """A server's policy and what its KV groups have room for.

    num_layers: the model's policy layers, which are all its layers where a policy propagates.
    stock: True if every policy the server was started for is ``full``; then scheduler, worker and
        model are vLLM's own.
    measured: what words in policies' names mean for this model.
    stash_tokens: prompt tokens whose hidden states the stash holds; 0 without one.
    recall_every: of the steps that retrieve every n-th measures recall; 0 for none.
    policies: those that the server was started for, `policy` first.
    shares: whether prompts that retention compacts share prefixes.
    keeps_by_reuse: whether the prefix cache keeps by reuse distance; else what was used last.
    request_policies: which policies requests may name, one of `REQUEST_POLICIES`.
    disabled: the parts that do not run, some of `PARTS`.
    drafts: how the model drafts for itself; None if it does not.
    """

    policy: KVPolicy
    layout: Layout
    num_layers: int
    debug: bool
    stock: bool = False
    measured: Measured = field(default_factory=Measured)
    stash_tokens: int = 0
    recall_every: int = 0
    policies: tuple[KVPolicy, ...] = ()
    shares: bool = True
    keeps_by_reuse: bool = True
    request_policies: str = ANY_THAT_FITS
    disabled: frozenset[str] = frozenset()
    drafts: Drafts | None = None

    @classmethod
    def from_vllm_config(cls, vllm_config: "VllmConfig") -> "KVSettings | None":
        """The settings in ``additional_config``; None if no policy is set.

        Raises:
            PolicyError: a policy that does not parse, is not served or does not suit the model.
            ValueError: a key of ours with a value of the wrong type, or a key that looks like one.
        """
        config = vllm_config.additional_config
        if not policy_is_set(config):
            return None
        assert isinstance(config, dict)
        model = vllm_config.model_config
        num_layers = model.get_total_num_hidden_layers()
        settings = cls.of(config, num_layers, windows_of(model))
        count = num_policy_layers(model) or num_layers
        if count != num_layers and not settings.layout.propagates:
            settings = cls.of(config, count)
        settings = replace(settings, layout=on_server(settings.layout, vllm_config))
        if not settings.layout.stash:
            if STASH_KEY in config:
                raise ValueError(
                    f"{STASH_KEY} has no effect: no policy of this server selects tokens to go on; "
                    "remove it"
                )
            return settings
        longest = model.max_model_len
        # One prompt of the greatest length, and beside it those that are done in one step.
        default = longest + vllm_config.scheduler_config.max_num_batched_tokens
        tokens = config.get(STASH_KEY, default)
        if type(tokens) is not int or tokens < longest:
            raise ValueError(
                f"{STASH_KEY} must be an integer of at least --max-model-len, {longest}: a longer "
                f"prompt would wait for ever; got {tokens!r}"
            )
        return replace(settings, stash_tokens=tokens)

    @classmethod
    def of(
        cls, config: dict[str, Any], num_layers: int, windows: Windows | None = None
    ) -> "KVSettings":
        """The settings in `config`, which has a ``kv_policy``, for a model of `num_layers`.

        Raises:
            PolicyError, ValueError: as ``from_vllm_config``.
        """
        debug = config.get(DEBUG_KEY, False)
        if not isinstance(debug, bool):
            raise ValueError(f"{DEBUG_KEY} must be true or false, got {debug!r}")
        recall_every = config.get(RECALL_KEY, 0)
        if type(recall_every) is not int or recall_every < 0:
            raise ValueError(
                f"{RECALL_KEY} must be a number of decode steps, 0 for never, got {recall_every!r}"
            )
        share = config.get(SHARE_KEY, "on")
        if share not in SHARES:
            raise ValueError(f'{SHARE_KEY} must be "on" or "off", got {share!r}')
        eviction = config.get(EVICTION_KEY, "adaptive")
        if eviction not in EVICTIONS:
            raise ValueError(f'{EVICTION_KEY} must be "adaptive" or "lru", got {eviction!r}')
        requests = config.get(REQUESTS_KEY, ANY_THAT_FITS)
        if requests not in REQUEST_POLICIES:
            raise ValueError(
                f"{REQUESTS_KEY} must be one of {', '.join(REQUEST_POLICIES)}, got {requests!r}; "
                f"{THOSE_NAMED} lets requests name the policies in {POLICY_KEY} and {LAYOUT_KEY}"
            )
        names = config.get(LAYOUT_KEY, [])
        if not isinstance(names, (list, tuple)):
            raise ValueError(
                f'{LAYOUT_KEY} must be a list of policies, for example ["speed-24"], got {names!r}'
            )
        disabled = disabled_parts(config)
        measured = Measured.of(config)
        keys = [POLICY_KEY, *(f"{LAYOUT_KEY}[{i}]" for i in range(len(names)))]
        named = zip(keys, [config[POLICY_KEY], *names], strict=True)
        policies = [_policy(key, name, num_layers, measured, windows) for key, name in named]
        drafts = Drafts.of(config)
        layout = layout_of([*policies, *(() if drafts is None else [drafts.policy])], num_layers)
        layout = replace(
            layout,
            windows=windows if layout.propagates else None,
            own_drafts=drafts is not None,
        )
        if recall_every and layout.sidecar is None:
            raise ValueError(
                f"{RECALL_KEY} has no effect: no policy of this server retrieves; remove it"
            )
        return cls(
            policy=policies[0],
            policies=tuple(policies),
            layout=layout,
            num_layers=num_layers,
            debug=debug,
            stock=drafts is None and all(p.is_full for p in policies),
            measured=measured,
            recall_every=recall_every,
            shares=share == "on",
            keeps_by_reuse=eviction == "adaptive",
            request_policies=requests,
            disabled=disabled,
            drafts=drafts,
        )

    def allows(self, policy: KVPolicy) -> bool:
        """Whether the operator lets requests name `policy`, if it fits."""
        if self.request_policies == ANY_THAT_FITS:
            return True
        named = self.policies if self.request_policies == THOSE_NAMED else ()
        return policy == self.policy or policy in named

    def may_retrieve(self) -> list[KVPolicy]:
        """What retrieves of the policies that the server was started for, and of those that
        requests may compose with its retrieval, where they may name any that fits.

        None where the model's own drafts alone retrieve, though requests may name their policy:
        what a server captures for it would cost every start."""
        found = [policy for policy in self.policies if policy.retrieve is not None]
        if self.drafts is not None and not found:
            return []
        if self.layout.sidecar is None or self.request_policies != ANY_THAT_FITS:
            return found
        for policy in self.policies:
            if policy.retrieve is None:
                composed = replace(policy, retrieve=self.layout.sidecar.largest)
                with suppress(PolicyError):
                    composed.check_composition()
                    found.append(composed)
        return found

    def names_allowed(self) -> str:
        """What requests may name, in words."""
        if self.stock or self.request_policies == NO_POLICY:
            return "no other policy"
        if self.request_policies == ANY_THAT_FITS:
            return "any policy that fits"
        return f"these policies alone: {', '.join(dict.fromkeys(map(str, self.policies)))}"

    def counted_policies(self) -> CountedPolicies:
        """Rows for counters by policy; those of the server, and `full`, have theirs for good."""
        return CountedPolicies([*map(str, self.policies or (self.policy,)), str(KVPolicy())])

    def parse(self, name: str) -> KVPolicy:
        """The policy `name` on this server, where words are layers if they are known.

        Raises:
            PolicyError: it does not parse, or is no string.
        """
        if not isinstance(name, str):
            return parse_policy(name)  # Through the cache only what can be a key of it.
        return _parse(name, self.measured, self.layout.windows)


def policy_is_set(config: Any) -> bool:
    """Whether ``additional_config`` sets a policy.

    Keys of others are theirs, unless they look like ours: a typo must not start a stock server.

    Raises:
        ValueError: a key that is or resembles one of ours, yet sets no policy; with a policy set,
            any other key that begins with ``kv_`` or ``kv-``, a part that cannot be disabled, or
            a variable that earlier versions read.
    """
    if not isinstance(config, dict):
        return False
    is_set = config.get(POLICY_KEY) is not None
    known = f"vllm-kvx knows {', '.join(PUBLIC_KEYS)}"
    for key in config:
        if key in REPLACED_KEYS:
            raise ValueError(_in_the_policy(key, key))
    if found := misspelling(config, KEYS):
        hint = f"did you mean {found.name!r}? " if found.name in PUBLIC_KEYS else ""
        raise ValueError(f"unknown key {found.key!r} in additional_config; {hint}{known}")
    if found := misspelling(config, tuple(REPLACED_KEYS)):
        raise ValueError(_in_the_policy(*found))
    for key in config if is_set else ():
        if isinstance(key, str) and key not in KEYS and has_prefix(key):
            raise ValueError(f"unknown key {key!r} in additional_config; {known}")
    without = [key for key in KEYS[1:] if key in config]
    if without and not is_set:
        raise ValueError(
            f"{' and '.join(without)} without {POLICY_KEY}, by flag or in additional_config: "
            f"set {POLICY_KEY} too ('full' runs every request in full by default)"
        )
    if is_set:
        # Here, and not with the other values: before a server measures layers for minutes.
        refuse_replaced()
        disabled_parts(config)
        _refuse_bare_names(config)
    return is_set


def _refuse_bare_names(config: dict[str, Any]) -> None:
    """Raise PolicyError, which says where, for a name that does not say how much stays."""
    layout = config.get(LAYOUT_KEY)
    layout = layout if isinstance(layout, (list, tuple)) else ()
    named = {POLICY_KEY: config[POLICY_KEY]}
    named |= {f"{LAYOUT_KEY}[{i}]": name for i, name in enumerate(layout)}
    for key, name in named.items():
        try:
            check_served(name if isinstance(name, str) else "")
        except PolicyError as error:
            raise PolicyError(f"{key}: {error}") from None


def _in_the_policy(key: str, name: str) -> str:
    """What to write in the place of `key`, which is `name` of `REPLACED_KEYS` or resembles it."""
    parameter = REPLACED_KEYS[name]
    example = "max" if parameter.endswith("_reduction") else "15"
    return (
        f"{key!r} is no key of additional_config: write it into the policy, "
        f"as in {parameter}={example},kv_rate=0.4"
    )


def request_policy(settings: KVSettings, sampling_params: "SamplingParams | None") -> KVPolicy:
    """The policy of a request that the API process has validated: its own or the server's."""
    extra = sampling_params.extra_args if sampling_params is not None else None
    name = extra.get(POLICY_KEY) if extra else None
    return settings.policy if name is None else settings.parse(name)


def _policy(
    where: str, name: Any, num_layers: int, measured: Measured, windows: Windows | None
) -> KVPolicy:
    """The policy `name`, found at `where`; its errors say where."""
    try:
        policy = _parse(name, measured, windows) if isinstance(name, str) else parse_policy(name)
        policy.check_model(num_layers)
        policy.check_composition()
        layout_of([policy], num_layers)  # Is every layer known that it splits at?
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from None
    return policy

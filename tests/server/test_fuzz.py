"""Whatever a user writes is understood or refused: names, a request's keys, a server's keys.

No other exception comes out, which would be a 500 or a page of traceback.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import options
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker.gpu.sample.logits_processor import (
    build_custom_logits_processors_params_validator,
)

from vllm_kvx.config.settings import KEYS, KVSettings, request_policy
from vllm_kvx.policy.layout import check_fits
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.server import request_check
from vllm_kvx.server.body_check import check_body
from vllm_kvx.server.misplaced import beside_body
from vllm_kvx.server.refusal_reasons import RefusedError
from vllm_kvx.server.request_check import class_path

LAYERS = 8
fuzz = settings(
    # Those of the day are the first ones of the night.
    max_examples=800 if options.nightly() else 200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

numbers = st.one_of(
    st.integers(-2, 40).map(str),
    st.integers().map(str),
    st.sampled_from(["0.1", "0.5", "1", "1.0", "1e-3", "nan", "inf", "-0.0", "08", "1_000", "٣"]),
    st.floats().map(repr),
)
words = st.sampled_from(
    [*("auto", "calibrated", "online", "sum", "max", "softmax", "block", "head", "full"), ""]
)


# By parameter, values of which most are allowed.
ALLOWED = {
    "kernel": ("1", "3", "7"),
    "dense_below": ("0", "auto", "4096"),
    "group": ("32", "64", "128"),
    "reduction": ("max", "softmax"),
    "tsp_layer": ("auto", "3"),
    "pivot": ("calibrated", "online", "3"),
    "granularity": ("entry", "block"),
    "heads": ("own", "shared"),
    "tsp_reduction": ("sum", "max"),
    "struct_reduction": ("sum", "max"),
}


@st.composite
def parts(draw: Any, wild: bool) -> str:
    """A part with a method and parameters that exist, and with any values if it is `wild`."""
    method = METHODS[draw(st.sampled_from(sorted(METHODS)))]
    name = method.name
    if not wild:
        name += f"-{draw(st.sampled_from([4, 32, 64]))}" if method.number else ""
    elif draw(st.booleans()):
        name += "-" + draw(numbers)
    some = st.sampled_from([*method.keys(), "window" if wild else ""])
    keys = [key for key in draw(st.lists(some, max_size=3, unique=True)) if key]
    keys += [key for key in method.mandatory() if key not in keys and key != method.number]

    def value(key: str) -> str:
        if wild:
            return draw(numbers | words)
        usual = ("0.1", "0.5", "1") if "rate" in key else ("1", "2", "16")
        return draw(st.sampled_from(ALLOWED.get(key, usual)))

    return name + ":" * bool(keys) + ",".join(f"{key}={value(key)}" for key in keys)


# What parses; texts near it; and any text.
good = st.sampled_from(
    [
        *("full", "speed-4", "speed-4:tail=2", "swiftkv-3", "selfonly-3", "fier-64", "quest-64"),
        *(
            "fastkv:kv_floor=0,tsp_layer=3",
            "structkv:pivot=3,kv_floor=0",
            "snapkv:kv_floor=0",
            "pyramidkv:kv_floor=0",
            "speed-4+fier-64",
        ),
        *(
            "fastkv:kv_floor=0",
            "structkv:kv_floor=0",
            "structkv:pivot=online,kv_floor=0",
            "gemfilter",
            "streamingllm:recent=1020",
            "knorm:kv_floor=0",
        ),
    ]
)
plain = parts(wild=False)
made = st.one_of(
    plain,
    st.lists(plain, min_size=2, max_size=3).map("+".join),
    st.lists(plain | parts(wild=True), min_size=1, max_size=3).map("+".join),
)


@st.composite
def damaged(draw: Any) -> str:
    """A name with a character taken out, put in or changed."""
    name = draw(good | made)
    at = draw(st.integers(0, len(name)))
    put = draw(st.sampled_from(["", "+", "-", ":", ",", "=", " ", "0", "K", "é", "\0", "\ud800"]))
    return name[:at] + put + name[at + draw(st.integers(0, 1)) :]


names = st.one_of(
    good, made, made, damaged(), st.text(max_size=40), st.text("speed-4+:=,.1", max_size=9)
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9))
values = st.recursive(
    scalars | names,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=9), v, max_size=3),
    max_leaves=5,
)


@st.composite
def near(draw: Any) -> str:
    """A key of ours as it might be written."""
    key = draw(st.sampled_from(KEYS))
    key = key.replace("_", draw(st.sampled_from(["_", "-", "", " ", "__", "."])))
    at = draw(st.integers(0, len(key)))
    key = key[:at] + draw(st.sampled_from(["", "", "s", "x", "_"])) + key[at:]
    return getattr(key, draw(st.sampled_from(["lower", "upper", "title"])))()


keys = st.one_of(st.sampled_from(KEYS), near(), st.text(max_size=12))


def assert_told(error: Exception) -> None:
    """It says something that a response can carry."""
    assert str(error).encode()


@given(names)
@fuzz
def test_a_name_means_a_policy_or_is_refused(name: str) -> None:
    try:
        policy = parse_policy(name)
    except PolicyError as error:
        assert_told(error)
        return
    canonical = str(policy)
    assert parse_policy(canonical) == policy
    assert str(parse_policy(canonical)) == canonical
    for check in (policy.check_composition, lambda: policy.check_model(LAYERS)):
        try:
            check()
        except PolicyError as error:
            assert_told(error)


SERVERS = [
    KVSettings.of({"kv_policy": first, "kv_layout": rest}, LAYERS)
    for first, *rest in (
        ["full"],
        ["speed-4"],
        ["fier-64"],
        ["full", "snapkv:kv_floor=0", "speed-4+fier-64"],
    )
]
others = st.dictionaries(keys, values, max_size=4)


@given(
    server=st.sampled_from(SERVERS),
    extra=st.none() | others | st.builds(lambda n, o: o | {"kv_policy": n}, names | values, others),
    prompt_logprobs=st.none() | st.just(1),
)
@fuzz
def test_a_request_passes_or_is_a_400(
    server: KVSettings, extra: dict[str, Any] | None, prompt_logprobs: int | None
) -> None:
    check = build_custom_logits_processors_params_validator([class_path(server, "fuzzed")])
    try:
        params = SamplingParams(extra_args=extra, prompt_logprobs=prompt_logprobs)
        check(params)
    except VLLMValidationError as error:
        assert_told(error)
        return
    policy = request_policy(server, params)
    if extra is None or extra.get("kv_policy") is None:
        assert policy == server.policy
    else:
        assert policy == parse_policy(extra["kv_policy"])
    if not policy.is_full:
        check_fits(policy, server.layout, LAYERS)


@given(
    body=others
    | st.builds(
        lambda key, inner: {key: inner},
        st.sampled_from(["vllm_xargs", "extra_body", "metadata", "sampling_params"]),
        others,
    ),
    path=st.sampled_from(["/v1/completions", "/inference/v1/generate", "/v1/systemone"]),
)
@fuzz
def test_a_body_passes_or_is_a_400(body: dict[str, Any], path: str) -> None:
    try:
        check_body(body, path)
    except RefusedError as error:
        assert_told(error)
        assert len(str(error)) < 500 and str(error).isprintable()
        return
    assert "kv_policy" not in body and "kv-policy" not in body and "KV_POLICY" not in body
    for name in ("extra_body", "metadata"):
        assert "kv_policy" not in body.get(name, {})
    if path == "/v1/completions":
        xargs = body.get("vllm_xargs")
        named = xargs.get("kv_policy", "") if isinstance(xargs, dict) else ""
        assert isinstance(named, str), "vLLM's model has no other"


@given(
    st.one_of(
        st.binary(max_size=40),
        st.builds(lambda key, value: f"{key}={value}".encode(errors="replace"), keys, names),
    )
)
@fuzz
def test_a_query_passes_or_is_a_400(query: bytes) -> None:
    for name, where in beside_body({"query_string": query, "headers": []}):
        assert where == "in the query" and name.encode()
    asked = {"query_string": query + b"&kv_policy=full", "headers": []}
    assert len(list(beside_body(asked))) == 1


good_config = st.fixed_dictionaries(
    {"kv_policy": good},
    optional={
        "kv_layout": st.lists(good, max_size=3),
        "kv_measured": st.fixed_dictionaries(
            {},
            optional={
                "tsp_layer": st.integers(-1, 9),
                "pivot": st.integers(-1, 9),
                "tsp_reduction": st.sampled_from(["sum", "max", "mean"]),
            },
        ),
        "kv_drafts": st.fixed_dictionaries(
            {"policy": good, "cache_to_weights": st.one_of(st.floats(), st.integers(), st.none())}
        ),
        "kv_disable": st.lists(st.sampled_from(["split_layers", "compiled_ranges", "both"])),
        "kv_stash_tokens": st.integers(500, 600),
        "kv_recall_every": st.integers(-1, 2),
        "kv_debug": st.booleans(),
        "kv_request_policies": st.sampled_from(["off", "layout", "list", "none"]),
    },
)


@given(
    st.one_of(
        good_config,
        others,
        st.builds(lambda a, b: a | b, good_config, others),
        st.builds(lambda n, o: o | {"kv_policy": n}, names | values, others),
        values,
    )
)
@fuzz
def test_a_server_has_settings_or_does_not_start(config: Any) -> None:
    vllm_config: Any = SimpleNamespace(
        additional_config=config,
        model_config=SimpleNamespace(
            get_total_num_hidden_layers=lambda: LAYERS,
            get_sliding_window=lambda: None,
            is_hybrid=False,
            max_model_len=512,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        speculative_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    try:
        found = KVSettings.from_vllm_config(vllm_config)
    except ValueError as error:
        assert_told(error)
        return
    if found is None:
        assert not isinstance(config, dict) or config.get("kv_policy") is None
        return
    assert found.policies[0] == found.policy and found.num_layers == LAYERS
    # Front ends get it by name, and know the same server.
    again = getattr(request_check, class_path(found, "fuzzed").split(":")[1]).settings
    assert (again.policy, again.layout, again.stock) == (found.policy, found.layout, found.stock)
    assert again.request_policies == found.request_policies
    for policy in (*found.policies, KVPolicy()):
        assert again.allows(policy) == found.allows(policy)


@pytest.mark.parametrize("text", ["k" * 100_000, "speed-4+" * 100, "+" * 500, "=" * 512, "-" * 512])
def test_long_names_are_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        parse_policy(text)

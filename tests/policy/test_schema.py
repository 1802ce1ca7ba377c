"""JSON schemas made from the code: they take all that it takes, and refuse what a typo makes."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from vllm_kvx.config.settings import KEYS, KVSettings, policy_is_set
from vllm_kvx.policy import patterns
from vllm_kvx.policy.auto import parse_auto
from vllm_kvx.policy.axes import Method
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.parameters import PolicyError, read_value
from vllm_kvx.policy.schema import limits_of, part_pattern
from vllm_kvx.policy.spec import is_bare, parse_policy
from vllm_kvx.tools.batch.lines import parse
from vllm_kvx.tools.policies.schema import document

DOCUMENT = document()
POLICIES = Draft7Validator(DOCUMENT)
CONFIGS, LINES, AT_DTYPES, SERVED = (
    Draft7Validator(DOCUMENT | {"allOf": [{"$ref": f"#/definitions/{name}"}]})
    for name in ("additionalConfig", "batchLine", "policyAtDtype", "servedPolicy")
)


def is_policy(text: str) -> bool:
    try:
        parse_policy(text)
    except PolicyError:
        return False
    return True


def written(limits: Any) -> st.SearchStrategy[str]:
    """Texts of values within the limits, in all the ways that names write numbers."""
    words = re.findall(r"[a-z]+", limits.pattern)
    number = st.one_of(
        st.integers(0, 300).map(str),
        st.integers(0, 10**9 - 1).map(str),
        st.floats(0, 1).map(repr),
        st.floats(0, 1).map(lambda v: f"{v:.3f}"),
        st.floats(0, 1).map(lambda v: f"{v:.2e}".replace("e+", "e")),
        st.integers(1, 10**6).map(lambda v: f"{v}e-6"),
    )
    texts = st.one_of(number, st.sampled_from(words)) if words else number
    return texts.filter(lambda text: limits.allows(read_value(text)))


@st.composite
def parts(draw: st.DrawFn) -> str:
    """A part of a policy's name whose parameters are within their limits, each by itself."""
    method = METHODS[draw(st.sampled_from(list(METHODS)))]
    text = method.name
    if method.number:
        text += f"-{draw(written(limits_of(method, method.number)))}"
    needed = [key for key in method.mandatory() if key != method.number]
    keys = draw(st.lists(st.sampled_from(method.keys()), unique=True)) if method.keys() else []
    keys = draw(st.permutations([*dict.fromkeys([*keys, *needed])]))
    pairs = [f"{key}={draw(written(limits_of(method, key)))}" for key in keys]
    return f"{text}:{','.join(pairs)}" if pairs else text


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.lists(parts(), min_size=1, max_size=3))
@example(["snapkv:kv_rate=1.0000000000000001"])
@example(["snapkv:kv_rate=0.10000000000000000001e1"])
@example(["snapkv:kv_rate=0.01e02"])
@example(["snapkv:kv_rate=1e-0"])
@example(["structkv:entropy_weight=0e7"])
@example(["gemfilter:rate=0.2,layer=3,window=4"])
@example(["snapkv:window=16", "fier-64"])
@example(["snapkv:window=16,kv_rate=0.1,kernel=5", "fier-64"])
@example(["fastkv:tsp_layer=3,kv_rate=1", "snapkv:kv_floor=0"])
@example(["streamingllm:sinks=8"])
@example(["streamingllm:sinks=8,recent=64"])
@example(["knorm:kv_budget=64"])
def test_the_schema_takes_every_policy(names: list[str]) -> None:
    text = "+".join(names)
    if len(text) > 512 or not is_policy(text):
        return
    assert POLICIES.is_valid(text), text
    assert AT_DTYPES.is_valid(text) and AT_DTYPES.is_valid(f"{text}@fp8")
    assert not POLICIES.is_valid(f"{text}@fp8")
    # What does not say how much stays is for tools alone.
    assert SERVED.is_valid(text) == (not is_bare(text)), text
    for part in names:
        method = METHODS[re.findall("^[a-z]+", part)[0]]
        assert re.search(part_pattern(method), part), part


@settings(max_examples=200, deadline=None)
@given(st.from_regex(r"[a-z]{0,9}(-[0-9]{0,5})?(:[a-z_]{0,8}=[0-9a-z.]{0,6})?", fullmatch=True))
def test_whatever_parses_is_in_the_schema(text: str) -> None:
    if is_policy(text):
        assert POLICIES.is_valid(text), text


# What nobody should deploy, and `parse_policy` refuses as well.
NO_POLICIES = (
    *(
        "",
        "snapvk",
        "sped-16",
        "Snapkv",
        "snapkv ",
        "snapkv\n",
        "full ",
        "none",
        "snapkv;kv_rate=1",
    ),
    *("speed", "speed-", "speed-0", "speed-x", "fier", "fier-16", "fier-9000", "fier-02048"),
    *("snapkv-4", "full-3", "full:kv_rate=1", "full+snapkv", "snapkv+full", "snapkv+", "+snapkv"),
    *("snapkv++knorm", "snapkv:", "snapkv:kv_rate", "snapkv:kv_rate=", "snapkv:=1", "full@fp8"),
    *("snapkv:kv_rate=0", "snapkv:kv_rate=0.0", "snapkv:kv_rate=1.1", "snapkv:kv_rate=-0.1"),
    *("snapkv:kv_rate=0,2", "snapkv:kv_rate=.2", "snapkv:kv_rate=2", "snapkv:rate=0.2"),
    *("snapkv:kernel=4", "snapkv:window=65", "snapkv:kernel=7.0", "snapkv:kv_budget=1e3"),
    *("gemfilter", "gemfilter:rate=0.2", "gemfilter:layer=auto", "fier-2048:group=48"),
    *("structkv:pivot=auto", "structkv:decay=0", "structkv:entropy_weight=1.5"),
    *("fastkv:tsp_layer=-1", "fastkv:tsp_layer=1.0", "streamingllm:sinks=0", "knorm:window=8"),
    *("speed-4+snapkv:kv_rate=2", "snapkv:kv_rate=0.2+fier-31", "snapkv:kv_rate=0.2:window=8"),
    *("snapkv:kv_budget=1000000000", "x" * 513),
)


@pytest.mark.parametrize("text", NO_POLICIES)
def test_the_schema_refuses_what_is_no_policy(text: str) -> None:
    assert not is_policy(text)
    assert not POLICIES.is_valid(text)
    for value in (None, 5, ["full"], {"policy": "full"}):
        assert not POLICIES.is_valid(value)


def fields() -> Iterator[tuple[type[Method], str]]:
    for method in METHODS.values():
        for field in dataclasses.fields(method):
            yield method, field.name


@pytest.mark.parametrize(("method", "key"), list(fields()))
def test_limits_are_the_same_in_words_schema_and_code(method: type[Method], key: str) -> None:
    limits = limits_of(method, key)
    schema = Draft7Validator(limits.schema)
    words = re.findall(r"[a-z]+", limits.pattern)
    for value in (*range(0, 300), 8192, 8193, 0.5, 1.5, -1, "x", None, *words):
        assert schema.is_valid(value) == limits.allows(value), (value, limits.wanted)
        text = str(value)
        if isinstance(value, int | str) and value not in (-1,):
            assert bool(re.fullmatch(limits.pattern, text)) == limits.allows(value), text


def test_integers_have_an_expression() -> None:
    for low, span, odd in itertools.product(
        (0, 1, 2, 9, 10, 19, 32, 99, 100, 123), (0, 1, 5, 8, 66, 90, 876, 900), (False, True)
    ):
        pattern = "|".join(patterns.integers(low, low + span, odd))
        for number in range(max(low - 12, 0), low + span + 12):
            wanted = low <= number <= low + span and (number % 2 == 1 or not odd)
            assert bool(pattern and re.fullmatch(pattern, str(number))) == wanted, (pattern, number)


def test_patterns_are_for_every_engine() -> None:
    """RE2 has no lookaround and no backreference, and JavaScript no inline flags."""
    texts = re.findall(r'"pattern": "((?:[^"\\]|\\.)*)"', json.dumps(DOCUMENT))
    assert len(texts) > 100
    assert not [text for text in texts if re.search(r"\(\?|\\\\[1-9]", text)]
    Draft7Validator.check_schema(DOCUMENT)


# Each with whether a server of 32 layers takes it.
CONFIG = {"kv_policy": "fier-2048"}
CONFIGURATIONS: tuple[tuple[dict[str, Any], bool], ...] = (
    (CONFIG, True),
    ({"kv_layout": ["snapkv:kv_rate=0.1", "full"]}, True),
    ({"kv_layout": ["snapkv", "full"]}, False),
    ({"kv_policy": "fastkv+fier-64"}, False),
    ({"kv_policy": "snapkv:kv_rate=0.1+fier-64"}, True),
    ({"kv_layout": "snapkv"}, False),
    ({"kv_layout": ["snapvk"]}, False),
    ({"kv_policy": "snapkv:kv_rate=0"}, False),
    ({"kv_policy": 5}, False),
    ({"kv_measured": {"tsp_layer": 15, "tsp_reduction": "max"}}, True),
    ({"kv_measured": None}, True),
    ({"kv_measured": {"tsp_layer": -1}}, False),
    ({"kv_measured": {"pivot": "middle"}}, False),
    ({"kv_measured": {"tsp_reduction": "mean"}}, False),
    ({"kv_measured": {"tsp_layer": 15, "tsp_rate": 0.5}}, True),
    ({"kv_measured": {"tsp_rate": 0}}, False),
    ({"kv_measured": {"struct_rate": 0.5}}, False),
    ({"kv_drafts": {"policy": "fier-64", "cache_to_weights": 0.5}}, True),
    ({"kv_drafts": None}, True),
    ({"kv_drafts": {"policy": "fier-64"}}, False),
    ({"kv_drafts": {"policy": "fier", "cache_to_weights": 1}}, False),
    ({"kv_drafts": {"policy": "fier-64", "cache_to_weights": -1}}, False),
    ({"kv_tsp_layer": 15}, False),
    ({"kv_disable": ["split_layers", "compiled_ranges"]}, True),
    ({"kv_disable": []}, True),
    ({"kv_disable": "split_layers"}, False),
    ({"kv_disable": ["inner_cuts"]}, False),
    ({"kv_debug": True, "kv_recall_every": 3, "kv_share": "off", "kv_eviction": "lru"}, True),
    ({"kv_debug": 1}, False),
    ({"kv_debug": None}, False),
    ({"kv_recall_every": -1}, False),
    ({"kv_recall_every": True}, False),
    ({"kv_share": False}, False),
    ({"kv_eviction": "fifo"}, False),
    ({"kv_request_policies": "list"}, True),
    ({"kv_request_policies": False}, False),
    ({"kv-policy": "full"}, False),
    ({"KV_POLICY": "full"}, False),
    ({"kvPolicy": "full"}, False),
    ({"kv.layout": []}, False),
    ({" kv_policy": "full"}, False),
    ({"kv_calibration": 1}, False),
    ({"KV-cache": 1}, False),
    ({"gdn_prefill_backend": "x", "cache_policy": 1, "kvcached": True, "k": 1}, True),
)


def takes(config: dict[str, Any]) -> bool:
    try:
        policy_is_set(config)
        KVSettings.of(config, 32)
    except (ValueError, PolicyError):
        return False
    return True


@pytest.mark.parametrize(("values", "is_taken"), CONFIGURATIONS)
def test_configurations_are_taken_by_both_or_by_none(
    values: dict[str, Any], is_taken: bool
) -> None:
    config = CONFIG | values
    assert takes(config) == is_taken
    assert CONFIGS.is_valid(config) == is_taken


@pytest.mark.parametrize(
    "name",
    ["auto", *(f"auto:keep={each}" for each in ("0.97", "1", "1.0", ".5", "0", "0.0", "1.2", "x"))],
)
def test_auto_is_taken_by_both_or_by_none(name: str) -> None:
    try:
        parse_auto(name)
        is_taken = True
    except PolicyError:
        is_taken = False
    assert CONFIGS.is_valid({"kv_policy": name}) == is_taken
    assert not CONFIGS.is_valid(CONFIG | {"kv_layout": [name]})


def test_every_key_of_a_configuration_has_a_schema() -> None:
    assert set(DOCUMENT["definitions"]["additionalConfig"]["properties"]) == set(KEYS)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.from_regex(r"[kK]?[vV]?[_-]?[a-zA-Z_-]{0,10}", fullmatch=True), st.just(0))
)
def test_keys_of_others_are_theirs(others: dict[str, int]) -> None:
    config = CONFIG | {key: value for key, value in others.items() if key not in KEYS}
    if takes(config):
        assert CONFIGS.is_valid(config), config


BODIES: tuple[tuple[Any, bool], ...] = (
    ({"model": "m"}, True),
    ({"vllm_xargs": {"kv_policy": "snapkv:kv_rate=0.2", "other": 1}}, True),
    ({"vllm_xargs": {"kv_policy": None}}, True),
    ({"vllm_xargs": None}, True),
    ({"stream": False, "background": None}, True),
    ({"vllm_xargs": {"kv_policy": "snapvk"}}, False),
    ({"vllm_xargs": {"kv_policy": "snapkv:kv_rate=0"}}, False),
    ({"vllm_xargs": {"kv_policy": {"name": "full"}}}, False),
    ({"vllm_xargs": {"kv-policy": "full"}}, False),
    ({"vllm_xargs": {"kvPolicy": "full"}}, False),
    ({"vllm_xargs": {"kv_layout": ["full"]}}, False),
    ({"stream": True}, False),
    ([], False),
)


@pytest.mark.parametrize(("body", "is_request"), BODIES)
def test_lines_are_taken_by_both_or_by_none(body: Any, is_request: bool) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    assert (parse(1, json.dumps(line).encode()).error is None) == is_request
    assert LINES.is_valid(line) == is_request
    for key in line:
        assert not LINES.is_valid({name: each for name, each in line.items() if name != key})

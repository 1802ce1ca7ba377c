"""Which engine answers for which policies, and what they keep and read."""

from collections.abc import Iterable

import pytest

from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import with_retrieval
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.tools.evaluate.groups import grouped, read_policies
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.shares import shares_of


def names_in(rows: Iterable[Row]) -> list[str]:
    return [str(row) for row in rows]


def test_as_few_engines_as_make_sense() -> None:
    names = ["snapkv", "fastkv", "structkv", "fier-64", "quest-64", "pyramidkv", "fier-512"]
    names.append("pyramidkv:kv_rate=0.2")
    groups = list(map(names_in, grouped(read_policies(names, 28), 28)))
    assert groups == [
        ["full", "snapkv", "fastkv", "structkv", "fier-64", "fier-512"],
        ["quest-64"],
        ["pyramidkv", "pyramidkv:kv_rate=0.2"],
    ]


def test_one_engine_measures_one_layer() -> None:
    names = ["fastkv", "fastkv:kv_rate=0.4", "fastkv:tsp_rate=0.4", "fastkv:tsp_layer=9,window=16"]
    first, second = map(names_in, grouped(read_policies(names, 28), 28))
    assert second == ["fastkv:tsp_rate=0.4"] and first == ["full", *names[:2], names[3]]


def test_full_is_always_asked() -> None:
    assert names_in(read_policies(["snapkv", "full"], 8)) == ["full", "snapkv"]


def test_each_cache_has_an_engine_of_its_own() -> None:
    names = ["fier-64", "full@fp8", "fier-64@fp8", "snapkv@fp8_e5m2"]
    policies = read_policies(names, 8)
    assert str(policies[Row("fier-64", "fp8")]) == "fier-64"
    assert policies[Row("full", "fp8")].is_full
    assert list(map(names_in, grouped(policies, 8))) == [["full", "fier-64"], names[1:3], names[3:]]
    # Two names of one dtype are one, and vLLM's quantized KV caches run `full`.
    twice = read_policies(["fier-64@fp8_e4m3", "fier-64@fp8"], 8)
    assert names_in(twice) == ["full", "fier-64@fp8"]
    over_int8 = [f"{name}@int8_per_token_head" for name in ("full", "fier-64", "quest-64")]
    over_int8 += ["fier-64@int8_per_token_head-skip-0-1"]
    assert names_in(read_policies(over_int8, 8)) == ["full", *over_int8]
    of_original = {row.of_original(): policy for row, policy in policies.items()}
    assert [len(rows) for rows in grouped(of_original, 8)] == [2, 2, 1]


@pytest.mark.parametrize(
    "name",
    [
        "full@int8",
        "full@",
        "full@auto",
        "snapkv@int8_per_token_head",
        "snapkvv",
        "snapkv (original)",
        "speed-9",
        "fastkv:tsp_layer=8",
    ],
)
def test_what_the_model_cannot_run_is_refused(name: str) -> None:
    with pytest.raises(PolicyError):
        read_policies([name], 8)


def test_retrieval_is_on_at_every_length() -> None:
    assert str(with_retrieval(parse_policy("snapkv+fier-64"))) == "snapkv+fier-64:dense_below=0"
    for name in ("fier-64:dense_below=100", "snapkv", "full"):
        assert str(with_retrieval(parse_policy(name))) == name


@pytest.mark.parametrize(
    ("name", "kept", "read", "propagated"),
    [
        ("full", 1.0, 1.0, 1.0),
        ("snapkv:kv_rate=0.2,kv_floor=0", 0.2, 0.2, 1.0),
        # Layers 0..3 run and keep all, the others anchor and tail.
        ("speed-4", (4 * 1000 + 4 * 2) / 8000, (4 * 1000 + 4 * 2) / 8000, (4000 + 8) / 8000),
        ("fastkv:tsp_layer=3,kv_rate=0.1,kv_floor=0", 0.1, 0.1, (4 * 1000 + 4 * 200) / 8000),
        ("fastkv:tsp_layer=3,kv_rate=1,kv_floor=0", 0.6, 0.6, 0.6),
        # Two dense layers, then the budget.
        ("fier-64:dense_below=0", 1.0, (2 * 1000 + 6 * 64) / 8000, 1.0),
        ("gemfilter:layer=3,rate=0.1,kv_floor=0", 0.1, 0.1, (4 * 1000 + 8 * 100) / 8000),
        ("selfonly-4:anchors=3", (4 * 1000 + 4 * 4) / 8000, (4 * 1000 + 4 * 4) / 8000, 0.502),
        # All is stored and read, and the upper layers run the last token.
        ("swiftkv-4", 1.0, 1.0, (4 * 1000 + 4) / 8000),
    ],
)
def test_shares(name: str, kept: float, read: float, propagated: float) -> None:
    found = shares_of(parse_policy(name), 1000, 16, 8)
    assert found == pytest.approx((kept, read, propagated))


def test_an_answer_that_ends_before_anything_is_dropped() -> None:
    policy = parse_policy("snapkv:kv_rate=0.1,kv_floor=0,after=32")
    for generated in (1, 32):
        assert shares_of(policy, 1000, 16, 8, generated=generated) == (1.0, 1.0, 1.0)
    assert shares_of(policy, 1000, 16, 8, generated=33) == shares_of(policy, 1000, 16, 8)
    assert shares_of(policy, 1000, 16, 8).kept < 0.15
    # Above the cut it never had more.
    policy = parse_policy("fastkv:tsp_layer=3,kv_rate=0.1,kv_floor=0,after=32")
    early = shares_of(policy, 1000, 16, 8, generated=32)
    assert early == pytest.approx((0.6, 0.6, 0.6))
    assert shares_of(policy, 1000, 16, 8, generated=33).kept < 0.15

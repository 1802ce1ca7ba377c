"""What a parsed policy is: its parts and parameters, the models that suit it, what goes with it."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from vllm_kvx.policy.axes import ScoreSpec
from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.policy.methods.snapkv import DEFAULT_KV_FLOOR, SnapKV
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import check_served, is_bare, parse_policy, servable
from vllm_kvx.policy.window_scores import DEFAULT_SCORE, WINDOW_SCORES


@pytest.mark.parametrize(
    ("name", "full", "lossy", "axes"),
    [
        ("full", True, False, []),
        ("speed-24", False, False, ["propagate"]),
        ("fastkv", False, True, ["propagate", "retain"]),
        ("fastkv:kv_rate=1", False, False, ["propagate"]),
        ("structkv", False, True, ["propagate", "retain"]),
        ("snapkv", False, True, ["retain"]),
        ("streamingllm", False, True, ["retain"]),
        ("speed-24+fier-64", False, True, ["propagate", "retrieve"]),
    ],
)
def test_properties(name: str, full: bool, lossy: bool, axes: list[str]) -> None:
    policy = parse_policy(name)
    assert policy.is_full is full
    assert policy.is_lossy_decode is lossy
    assert list(policy.parameters()) == axes
    json.dumps(policy.parameters())


def test_parameters_are_complete() -> None:
    assert parse_policy("speed-24+snapkv:kv_budget=64").parameters() == {
        "propagate": {"method": "speed", "cutoff": 24, "anchors": 1, "tail": 1},
        "retain": {
            **{"method": "snapkv", "kv_budget": 64, "window": 8, "kernel": 7},
            "score": DEFAULT_SCORE,
            "after": 0,
            "lookahead": 0,
        },
    }
    assert parse_policy("fastkv").parameters()["retain"] == {
        "method": "fastkv",
        "kv_rate": 0.1,
        "kv_floor": DEFAULT_KV_FLOOR,
        "window": 8,
        "kernel": 7,
        "score": DEFAULT_SCORE,
        "tsp_layer": "auto",
        "tsp_reduction": "sum",
        "after": 0,
    }
    assert parse_policy("fastkv:tsp_layer=3").parameters()["retain"]["tsp_rate"] == 0.2


def test_a_rate_that_is_given_is_told_from_one_that_is_left_open() -> None:
    """Where the layer is known there is nothing to measure, and one name for the default."""
    left, given = parse_policy("fastkv"), parse_policy("fastkv:tsp_rate=0.2")
    assert (str(left), str(given)) == ("fastkv", "fastkv:tsp_rate=0.2") and left != given
    assert left.propagate.num_propagated(4096) == given.propagate.num_propagated(4096) == 819
    layer = "fastkv:tsp_layer=3"
    assert parse_policy(f"{layer},tsp_rate=0.2") == parse_policy(layer)
    assert str(parse_policy(f"{layer},tsp_rate=0.2")) == layer
    for method in (left.propagate, given.propagate):
        assert str(dataclasses.replace(method, tsp_layer=3)) == layer
    open_layer = dataclasses.replace(left.propagate, tsp_layer=3, tsp_rate=0.4)
    assert str(open_layer) == f"{layer},tsp_rate=0.4"


@pytest.mark.parametrize(
    ("name", "num_layers", "message"),
    [
        ("speed-40", 32, "speed-40: this model has 32 layers; use speed-1 .. speed-31"),
        ("speed-32", 32, "speed-32: this model has 32 layers; use speed-1 .. speed-31"),
        ("speed-2", 2, "speed-2: this model has 2 layers; use speed-1"),
        ("speed-1", 1, "speed-1: this model has 1 layer; speed needs at least 2; use full"),
        ("selfonly-9", 8, "selfonly-9: this model has 8 layers; use selfonly-1 .. selfonly-7"),
        ("swiftkv-8+fier-64", 8, "swiftkv-8: this model has 8 layers; use swiftkv-1 .. swiftkv-7"),
        (
            "fastkv:tsp_layer=32",
            32,
            "fastkv:tsp_layer=32: this model has 32 layers; use tsp_layer=0 .. tsp_layer=31",
        ),
        (
            "fier-64+structkv:pivot=28",
            28,
            "structkv:pivot=28: this model has 28 layers; use pivot=0 .. pivot=27",
        ),
    ],
)
def test_model_too_shallow(name: str, num_layers: int, message: str) -> None:
    with pytest.raises(PolicyError, match=f"^{re.escape(message)}$"):
        parse_policy(name).check_model(num_layers)


def test_model_deep_enough() -> None:
    for name in ("speed-1", "speed-31", "fastkv", "fastkv:tsp_layer=31", "structkv:pivot=31"):
        parse_policy(name).check_model(32)


def test_these_go_together() -> None:
    for name in ("full", "speed-24:tail=3", "fier-1024", "quest-1024", "snapkv+speed-24+fier-64"):
        parse_policy(name).check_composition()
    for name in ("speed-24+snapkv", "speed-24+streamingllm", "fastkv:kv_rate=1+snapkv"):
        parse_policy(name).check_composition()


# Two methods of one policy -> what the message must contain; without any they go together.
COMPOSED = {
    "fastkv:kv_rate=1+streamingllm": [
        "streamingllm goes by position, and which positions fastkv:kv_rate=1 computes",
        "chosen by data: compose it with speed-K, or retain with snapkv",
    ],
    "structkv:pivot=3,kv_rate=1+streamingllm": ["goes by position", "compose it with speed-K"],
    "fastkv:kv_rate=1+structkv:pivot=3,struct_rate=1": [
        "fastkv:kv_rate=1 and structkv:pivot=3,struct_rate=1 score keys differently",
        "use structkv's own struct_rate and kv_rate, or retain with snapkv",
    ],
    "fastkv:kv_rate=1+structkv:pivot=3,struct_rate=1,heads=own,kernel=1": ["windows or kernels"],
    "fastkv:tsp_layer=3,kv_rate=1+structkv:pivot=3,struct_rate=1,heads=own": [],
    "fastkv:tsp_layer=3,kv_rate=1,kernel=1+structkv:pivot=3,struct_rate=1,heads=own,kernel=1": [],
    "fastkv:kv_rate=1+structkv:pivot=3,struct_rate=1,granularity=block": ["keys differently"],
    "fastkv:tsp_layer=3,kv_rate=1+snapkv:window=4": [
        "fastkv:kv_rate=1,tsp_layer=3 and snapkv:window=4 score keys by different windows",
        "give both the same window and kernel",
    ],
    "fastkv:tsp_layer=3,kv_rate=1+snapkv:kernel=5": ["the same window and kernel"],
    "fastkv:tsp_layer=3,kv_rate=1,window=4,kernel=5+snapkv:window=4,kernel=5": [],
    "fastkv:tsp_layer=3,kv_rate=1+snapkv:kv_rate=0.5": [],
    # StructKV pools nothing to choose tokens, so SnapKV's kernel is its own.
    "structkv:pivot=3,kv_rate=1+snapkv": [],
    "structkv:pivot=3,kv_rate=1+snapkv:kernel=5": [],
    "structkv:pivot=3,kv_rate=1,window=4+snapkv:window=4": [],
    "structkv:pivot=3,kv_rate=1+snapkv:window=4": ["the same window and kernel"],
    "speed-4+structkv:pivot=4,struct_rate=1,granularity=block": [
        "structkv:pivot=4,struct_rate=1,granularity=block: blocks are ranked at layer 4, which "
        "speed-4 does not run for every token: use a pivot below 4 or granularity=token"
    ],
    "speed-4+structkv:pivot=5,struct_rate=1,granularity=block": ["ranked at layer 5"],
    "speed-4+structkv:pivot=3,struct_rate=1,granularity=block": [],
    "speed-4+structkv:pivot=5,struct_rate=1": [],
    "speed-4+snapkv:window=4,kernel=5": [],
    "swiftkv-4+snapkv": [
        "swiftkv-4 keeps every entry of a prompt, and runs the upper layers for its last token",
        "give either by itself, or snapkv after speed-4",
    ],
    "swiftkv-4+streamingllm": ["streamingllm after speed-4"],
    "swiftkv-4+quest-64": [],
    "selfonly-4:anchors=2+fier-64": [
        "selfonly-4:anchors=2 is a diagnostic that is served by itself: drop fier-64, or compose "
        "it with speed-4"
    ],
    "selfonly-4+knorm": ["drop knorm, or compose it with speed-4"],
    "speed-4+snapkv:lookahead=4": ["drafts tokens", "leave out lookahead=, or the other method"],
    "speed-4+fier-64:reuse_layers=2": ["leave out reuse_layers=, or the other method"],
    "snapkv+quest-64:reuse_layers=2": ["beside another method layers may hold other tokens"],
    "fastkv:kv_rate=1,kv_floor=0+snapkv:after=4": [],
    "fastkv:tsp_layer=3,kv_rate=1+pyramidkv:after=4": [],
    "structkv:pivot=3,kv_rate=1+snapkv:window=4,after=4": ["by different windows or kernels"],
    "structkv:pivot=3,kv_rate=1+criticalkv:after=4": [],
    "gemfilter:layer=3+snapkv:after=4": ["waits for generated tokens", "leave out after="],
    "speed-4+snapkv:after=4": ["waits for generated tokens", "leave out after="],
    "fastkv:kv_rate=1,after=4+snapkv:kv_rate=0.2": ["retains all", "write after= in the method"],
    "fastkv:after=4+fier-64": [],
    "fastkv:kv_rate=1+snapkv:after=4+quest-64": [],
    "gemfilter:layer=3+snapkv:after=4+fier-64": ["never tested beside gemfilter"],
    "fastkv:kv_rate=1+snapkv:lookahead=4": ["drafts tokens", "leave out lookahead="],
    "criticalkv:after=4+fier-64": [],
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composed(name: str) -> None:
    if not COMPOSED[name]:
        parse_policy(name).check_composition()
        return
    with pytest.raises(PolicyError) as error:
        parse_policy(name).check_composition()
    for wanted in COMPOSED[name]:
        assert wanted in str(error.value)


FASTKV = ScoreSpec("window_attention", window=8, kernel=7)


@pytest.mark.parametrize(
    ("keeps_by", "unit", "message"),
    [
        (FASTKV, "entry", None),
        (FASTKV, "block", "score keys differently"),
        (dataclasses.replace(FASTKV, over_heads=True), "entry", "score keys differently"),
        (dataclasses.replace(FASTKV, decay=0.9), "entry", "score keys differently"),
        (dataclasses.replace(FASTKV, window=9), "entry", "the same window and kernel"),
        (dataclasses.replace(FASTKV, kernel=5), "entry", "the same window and kernel"),
        (ScoreSpec("another", window=8, kernel=1), "entry", None),
        (ScoreSpec("another", window=0, kernel=1), "entry", None),
        (ScoreSpec("another", window=9, kernel=1), "entry", "the same window and kernel"),
    ],
)
def test_retention_that_follows_fastkv(keeps_by: ScoreSpec, unit: str, message: str | None) -> None:
    """By what it scores, whatever it is called."""
    names = {"name": "kept", "keeps_by": keeps_by, "unit": unit}
    retain = type("Kept", (SnapKV,), names)()
    fastkv = FastKV(kv_rate=1)
    if message is None:
        fastkv.check_retain(retain)
        return
    with pytest.raises(PolicyError, match=message):
        fastkv.check_retain(retain)


def test_every_parameter_is_documented() -> None:
    for method in METHODS.values():
        # FastKV inherits some parameters and refers to them.
        text = (method.__doc__ or "").replace("\n", " ")
        for field in dataclasses.fields(method):
            assert re.search(rf"\b{field.name}\b", text), f"{method.name}: {field.name}"


@pytest.mark.parametrize(
    "name",
    [
        "snapkv:score=critical",
        "snapkv:kv_budget=64,score=critical,kernel=3",
        "pyramidkv:groups=1,score=critical",
        "fastkv:tsp_layer=3,score=critical",
        "structkv:pivot=3,heads=own,score=critical",
    ],
)
def test_criticalkv_is_a_score_by_its_own_name(name: str) -> None:
    """One score, whoever retains by it."""
    retain = parse_policy(name).retain
    assert retain is not None and str(parse_policy(name)).count("score=critical") == 1
    kernel = f":kernel={retain.parameters()['kernel']}"
    critical = parse_policy(f"criticalkv{kernel}").retain
    assert critical is not None and retain.keeps_by == critical.keeps_by
    assert "score" not in critical.parameters() and "kernel" in critical.parameters()


def test_scores() -> None:
    by_name = {s: parse_policy(f"snapkv:score={s}").retain for s in WINDOW_SCORES}
    assert len({part.keeps_by for part in by_name.values() if part}) == len(by_name) == 2
    assert str(parse_policy(f"snapkv:score={DEFAULT_SCORE}")) == "snapkv"
    # Tokens go on by attention, whatever is retained by.
    scored, plain = (
        parse_policy(f"fastkv:tsp_layer=3{more}").propagate for more in (",score=critical", "")
    )
    assert scored is not None and plain is not None and scored.selects_by == plain.selects_by
    shared = parse_policy("structkv:pivot=3,score=critical").retain
    assert shared is not None and isinstance(shared.keeps_by, ScoreSpec)
    assert shared.keeps_by.over_heads and shared.keeps_by.needs_value_norms


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("snapkv:score=values", "score must be one of attention, critical, got 'values'"),
        ("criticalkv:score=critical", "unknown parameter 'score'"),
        ("gemfilter:layer=3,score=critical", "unknown parameter 'score'"),
        ("structkv:pivot=3,granularity=block,score=critical", "use granularity=token"),
    ],
)
def test_scores_that_cannot_be_had(name: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        parse_policy(name)


def test_no_vllm_import() -> None:
    modules = "vllm_kvx.policy.layout, vllm_kvx.policy.storage"
    code = f"import sys, {modules}; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("snapkv:after=2,lookahead=2", "snapkv: after and lookahead both say which tokens"),
        ("criticalkv:window=60,lookahead=5", "window and lookahead are at most 64 tokens together"),
        ("pyramidkv:window=60,after=5", "window and after are at most 64 tokens together"),
        ("fastkv:window=60,after=5", "fastkv: window and after are at most 64 tokens together"),
        ("structkv:window=60,after=5", "window and after are at most 64 tokens together"),
        ("structkv:granularity=block,after=5", "structkv: after waits for generated tokens with"),
        ("structkv:pivot=online,after=5", "structkv: after waits for generated tokens with"),
        ("snapkv:lookahead=64", "lookahead must be an integer from 0 to 63"),
    ],
)
def test_tokens_behind_the_prompt(name: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        parse_policy(name)


def test_what_is_drafted_fits_into_the_context() -> None:
    policy = parse_policy("snapkv:lookahead=16")
    assert [policy.num_drafted(n) for n in (512, 513)] == [0, 16]
    policy.check_length(1008, 1024)
    policy.check_length(512, 512)
    with pytest.raises(PolicyError, match="shorten the prompt to 1008 tokens, or leave out"):
        policy.check_length(1009, 1024)


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("snapkv", "snapkv:kv_rate=0.1"),
        ("snapkv+fier-64", "snapkv:kv_rate=0.1+fier-64"),
        ("fastkv", "fastkv:kv_rate=0.1"),
        ("structkv+fier-64", "structkv:kv_rate=0.1+fier-64"),
        ("knorm", "knorm:kv_rate=0.1"),
        ("streamingllm+fier-64", "streamingllm:recent=1020+fier-64"),
        # Other parameters do not say how much stays, at their defaults or not.
        ("snapkv:window=8", "snapkv:kv_rate=0.1"),
        ("snapkv:kv_floor=0", "snapkv:kv_floor=0,kv_rate=0.1"),
        ("fastkv:tsp_layer=15", "fastkv:tsp_layer=15,kv_rate=0.1"),
        ("fastkv:tsp_rate=0.3+fier-64", "fastkv:tsp_rate=0.3,kv_rate=0.1+fier-64"),
        ("structkv:pivot=3,struct_rate=1", "structkv:pivot=3,struct_rate=1,kv_rate=0.1"),
        ("streamingllm:sinks=8", "streamingllm:sinks=8,recent=1020"),
        ("pyramidkv:beta=10", "pyramidkv:beta=10,kv_rate=0.1"),
        ("knorm:kv_floor=512", "knorm:kv_rate=0.1"),
    ],
)
def test_a_bare_name_is_not_served(name: str, served: str) -> None:
    """It parses, and means the paper's rates; written out these are served."""
    with pytest.raises(PolicyError, match="does not say how much stays") as refused:
        check_served(name)
    policy = parse_policy(name)
    assert servable(policy) == served and parse_policy(served) == policy
    check_served(served)
    assert is_bare(name) and not is_bare(served)
    (method,) = (part for part in policy.parts if part.served_as)
    said = str(refused.value)
    assert f"the paper's {served.partition('+')[0]}" in said
    # A parameter that was written stays in what is to be written.
    own = [pair for part in name.split("+") for pair in part.partition(":")[2].split(",")]
    advised = said.partition(": write ")[2].partition(", which")[0]
    assert all(pair in advised for pair in own)
    assert set(method.served_as.partition(":")[2].split(",")) <= set(
        advised.partition(":")[2].split(",")
    )
    check_served(advised)
    check_served(method.served_as)
    assert parse_policy(method.served_as).parts[0].name == method.name


@pytest.mark.parametrize(
    "name",
    [
        "full",
        "speed-24",
        "fier-2048",
        "streamingllm:sinks=8,recent=64",
        "snapkv:kv_budget=64",
        "structkv:pivot=3,kv_rate=0.2",
        "gemfilter:layer=3,rate=0.2",
    ],
)
def test_what_is_served_as_it_is_written(name: str) -> None:
    check_served(name)
    assert servable(parse_policy(name)) == str(parse_policy(name))


@pytest.mark.parametrize(
    ("name", "advised"),
    [
        ("snapkv:lookahead=32", "snapkv:lookahead=32,kv_rate=0.2"),
        ("snapkv:after=16", "snapkv:after=16,kv_rate=0.2"),
        ("criticalkv:window=64", "criticalkv:window=64,kv_rate=0.2"),
    ],
)
def test_what_is_advised_goes_with_what_is_written(name: str, advised: str) -> None:
    with pytest.raises(PolicyError, match=f": write {advised}, which loses fewer, snapkv:kv_rate"):
        check_served(name)

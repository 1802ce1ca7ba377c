"""Policy names: grammar, limits, canonical form, and errors that say what to do."""

import dataclasses
import random
import re

import pytest

from vllm_kvx.policy.axes import Method
from vllm_kvx.policy.methods.baselines.gemfilter import GemFilter
from vllm_kvx.policy.methods.baselines.quest import Quest
from vllm_kvx.policy.methods.baselines.selfonly import SelfOnly
from vllm_kvx.policy.methods.baselines.streamingllm import StreamingLLM
from vllm_kvx.policy.methods.baselines.swiftkv import SwiftKV
from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.policy.methods.fier import FIER
from vllm_kvx.policy.methods.snapkv import SnapKV
from vllm_kvx.policy.methods.speed import Speed
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy

# name -> (canonical name, policy)
VALID = {
    "full": ("full", KVPolicy()),
    "speed-24": ("speed-24", KVPolicy(propagate=Speed(24))),
    "speed-24:anchors=0": ("speed-24:anchors=0", KVPolicy(propagate=Speed(24, anchors=0))),
    "speed-24:tail=1,anchors=1": ("speed-24", KVPolicy(propagate=Speed(24))),
    "speed-7:tail=4,anchors=2": ("speed-7:anchors=2,tail=4", KVPolicy(propagate=Speed(7, 2, 4))),
    "fastkv": ("fastkv", KVPolicy(propagate=FastKV(), retain=FastKV())),
    "fastkv:tsp_layer=15,tsp_rate=0.2,kv_rate=0.1": (
        "fastkv:tsp_layer=15",
        KVPolicy(propagate=FastKV(tsp_layer=15), retain=FastKV(tsp_layer=15)),
    ),
    "fastkv:kv_rate=0.2": ("fastkv:kv_rate=0.2", KVPolicy.of([FastKV(kv_rate=0.2)])),
    "fastkv:kv_rate=1": ("fastkv:kv_rate=1", KVPolicy(propagate=FastKV(kv_rate=1))),
    "fastkv:kv_rate=1.0": ("fastkv:kv_rate=1", KVPolicy(propagate=FastKV(kv_rate=1))),
    "fastkv:tsp_rate=1": ("fastkv:tsp_rate=1", KVPolicy(retain=FastKV(tsp_rate=1))),
    "fastkv:tsp_rate=1,kv_rate=1": ("full", KVPolicy()),
    "fastkv:tsp_reduction=max": (
        "fastkv:tsp_reduction=max",
        KVPolicy.of([FastKV(tsp_reduction="max")]),
    ),
    "fastkv:kv_budget=512": ("fastkv:kv_budget=512", KVPolicy.of([FastKV(kv_budget=512)])),
    "snapkv": ("snapkv", KVPolicy(retain=SnapKV())),
    "snapkv:kv_floor=400": ("snapkv:kv_floor=400", KVPolicy(retain=SnapKV(kv_floor=400))),
    "gemfilter:layer=3,kv_floor=40": (
        "gemfilter:layer=3,kv_floor=40",
        KVPolicy.of([GemFilter(3, kv_floor=40)]),
    ),
    "swiftkv-16": ("swiftkv-16", KVPolicy(propagate=SwiftKV(16))),
    "fier-64+swiftkv-3": ("swiftkv-3+fier-64", KVPolicy(SwiftKV(3), retrieve=FIER(64))),
    "selfonly-24": ("selfonly-24", KVPolicy(propagate=SelfOnly(24))),
    "selfonly-24:anchors=0": ("selfonly-24:anchors=0", KVPolicy(propagate=SelfOnly(24, 0))),
    "snapkv:kv_rate=1": ("full", KVPolicy()),
    "snapkv:kv_rate=1e-05": ("snapkv:kv_rate=1e-05", KVPolicy(retain=SnapKV(kv_rate=1e-5))),
    "snapkv:window=16,kernel=5": (
        "snapkv:window=16,kernel=5",
        KVPolicy(retain=SnapKV(window=16, kernel=5)),
    ),
    "structkv": ("structkv", KVPolicy(propagate=StructKV(), retain=StructKV())),
    "structkv:pivot=online": ("structkv:pivot=online", KVPolicy.of([StructKV("online")])),
    "structkv:pivot=0,granularity=block": (
        "structkv:pivot=0,granularity=block",
        KVPolicy.of([StructKV(0, granularity="block")]),
    ),
    "structkv:kv_budget=512": ("structkv:kv_budget=512", KVPolicy.of([StructKV(kv_budget=512)])),
    "structkv:pivot=online,kv_budget=512,struct_rate=0.05": (
        "structkv:pivot=online,struct_rate=0.05,kv_budget=512",
        KVPolicy.of([StructKV("online", 0.05, kv_budget=512)]),
    ),
    "structkv:heads=shared,kernel=7": ("structkv", KVPolicy.of([StructKV()])),
    "structkv:kernel=1": ("structkv:kernel=1", KVPolicy.of([StructKV(kernel=1)])),
    "structkv:pivot=online,kernel=9,heads=own": (
        "structkv:pivot=online,heads=own,kernel=9",
        KVPolicy.of([StructKV("online", heads="own", kernel=9)]),
    ),
    "structkv:pivot=0,granularity=block,heads=shared": (
        "structkv:pivot=0,granularity=block",
        KVPolicy.of([StructKV(0, granularity="block")]),
    ),
    "structkv:struct_rate=1": ("structkv:struct_rate=1", KVPolicy(retain=StructKV(struct_rate=1))),
    "structkv:entropy_weight=0": (
        "structkv:entropy_weight=0",
        KVPolicy.of([StructKV(entropy_weight=0)]),
    ),
    "streamingllm": ("streamingllm", KVPolicy(retain=StreamingLLM())),
    "streamingllm:sinks=4,recent=252": (
        "streamingllm:recent=252",
        KVPolicy(retain=StreamingLLM(recent=252)),
    ),
    "streamingllm:kv_rate=0.1": (
        "streamingllm:kv_rate=0.1",
        KVPolicy(retain=StreamingLLM(kv_rate=0.1)),
    ),
    "streamingllm:kv_rate=1": ("full", KVPolicy()),
    "fier-1024": ("fier-1024", KVPolicy(retrieve=FIER(1024))),
    "fier-64:group=64,reduction=sum": (
        "fier-64:group=64,reduction=sum",
        KVPolicy(retrieve=FIER(64, 64, "sum")),
    ),
    "fier-32": ("fier-32", KVPolicy(retrieve=FIER(32))),
    "quest-32:page=32": ("quest-32:page=32", KVPolicy(retrieve=Quest(32, 32))),
    "fier-256:group=256": ("fier-256:group=256", KVPolicy(retrieve=FIER(256, 256))),
    "fier-64:dense_below=auto": ("fier-64", KVPolicy(retrieve=FIER(64))),
    "quest-1024": ("quest-1024", KVPolicy(retrieve=Quest(1024))),
    "quest-64:page=8,dense_below=0": (
        "quest-64:page=8,dense_below=0",
        KVPolicy(retrieve=Quest(64, 8, dense_below=0)),
    ),
    "speed-24+fier-2048": (
        "speed-24+fier-2048",
        KVPolicy(propagate=Speed(24), retrieve=FIER(2048)),
    ),
    "fier-2048+speed-24": (
        "speed-24+fier-2048",
        KVPolicy(propagate=Speed(24), retrieve=FIER(2048)),
    ),
    "fastkv+fier-512": ("fastkv+fier-512", KVPolicy(FastKV(), FastKV(), FIER(512))),
    "quest-512+snapkv+speed-16": (
        "speed-16+snapkv+quest-512",
        KVPolicy(Speed(16), SnapKV(), Quest(512)),
    ),
    "speed-8+fastkv:tsp_rate=1": (
        "speed-8+fastkv:tsp_rate=1",
        KVPolicy(Speed(8), FastKV(tsp_rate=1)),
    ),
}


# name -> what the message must contain
INVALID = {
    "": ["empty policy name", "full, speed-K, fastkv"],
    "ful": ["unknown policy 'ful'", "did you mean full?"],
    "spede-24": ["unknown policy 'spede-24'", "did you mean speed-K?", "fier-BUDGET"],
    "speed24": ["unknown policy 'speed24'", "did you mean speed-K?"],
    "zzz": ["unknown policy 'zzz'", "allowed: full, speed-K"],
    "24": ["unknown policy '24'"],
    "-24": ["unknown policy '-24'"],
    "Speed-24": ["lower case", "write 'speed-24'"],
    "Sped-24": ["unknown policy 'sped-24'", "did you mean speed-K?"],
    "None": ["unknown policy 'none'", "did you mean full?"],
    **{name: ["did you mean full?"] for name in ("none", "off", "stock", "default")},
    **{name: ["a server chooses one for it at start"] for name in ("auto", "auto:keep=0.9")},
    "snapkv:kv_rate=0,2": ["'2' is not key=value", "did you mean kv_rate=0.2?"],
    "fastkv:tsp_rate=0,25,window=8": ["did you mean tsp_rate=0.25?"],
    "snapkv:kv_budget=1,024": ["'024' is not key=value", "did you mean kv_budget=1024?"],
    "snapkv:window=8,2": ["'2' is not key=value; parameters of snapkv"],
    "snapkv:kv_rate=2,5": ["'5' is not key=value; parameters of snapkv"],
    "snapkv:0,2": ["'0' is not key=value; parameters of snapkv"],
    " speed-24": ["no whitespace"],
    "speed-24\n": ["no whitespace"],
    "speed-24 + fier-1024": ["no whitespace; policies compose", "write 'speed-24+fier-1024'"],
    "speed-4 fier-64": ["no whitespace; policies compose with '+': write 'speed-4+fier-64'"],
    "speed-4,fier-64": ["'speed-4,fier-64': policies compose with '+': write 'speed-4+fier-64'"],
    "Speed-4,fier-64": ["policies compose with '+': write 'speed-4+fier-64'"],
    "speed-4 & fier-64": ["no whitespace; policies compose with '+': write 'speed-4+fier-64'"],
    "speed-4&fier-64": ["policies compose with '+': write 'speed-4+fier-64'"],
    "snapkv:kv_rate=0.2,window=8,fier-64:group=64,reduction=sum": [
        "write 'snapkv:kv_rate=0.2,window=8+fier-64:group=64,reduction=sum'"
    ],
    "speed-4,gemfilter:layer=3": ["compose with '+' alone; 'speed-4+gemfilter:layer=3': two ans"],
    "speed-4,fier": ["policies compose with '+' alone; 'speed-4+fier': fier needs a number"],
    "speed-4,full": ["policies compose with '+' alone; 'speed-4+full': full is no policy to"],
    "speed-4+fier-64,x": ["got '64,x'"],
    "speed": ["speed needs a number, speed-K; for example speed-24"],
    "fier": ["fier needs a number", "for example fier-1024"],
    "quest:page=16": ["quest needs a number", "for example quest-1024"],
    "swiftkv": ["swiftkv needs a number, swiftkv-K; for example swiftkv-16"],
    "swiftkv-0": ["swiftkv-K: K must be an integer of at least 1, got 0; for example swiftkv-16"],
    "swiftkv-4:tail=2": ["unknown parameter 'tail'", "parameters of swiftkv: none"],
    "selfonly-4:anchors=-1": ["selfonly: anchors must be an integer of at least 0"],
    "selfonly-4:tail=2": ["unknown parameter 'tail'", "parameters of selfonly: anchors"],
    "selfonly-4+speed-4": ["two answers on the propagate axis"],
    "speed-": ["speed-K: K must be an integer of at least 1, got ''; for example speed-24"],
    "speed-0": ["K must be an integer of at least 1, got 0"],
    "speed--1": ["K must be an integer of at least 1, got '-1'"],
    "speed-1.5": ["K must be an integer of at least 1, got 1.5"],
    "speed-abc": ["K must be an integer of at least 1, got 'abc'"],
    "speed-024": ["K must be an integer"],
    "speed-２４": ["K must be an integer"],
    "speed-1e1": ["K must be an integer"],
    "speed-2_4": ["K must be an integer"],
    "speed-24-8": ["K must be an integer", "'24-8'"],
    "speed-9999999999": ["too large", "at most 9 digits"],
    "speed-" + "9" * 480: ["too large"],
    "fastkv:kv_rate=" + "9" * 480: ["too large"],
    "fastkv:kv_rate=1e999": ["(0, 1]"],
    "speed-24:" + "x" * 600: ["at most 512 characters"],
    "speed-24:": ["'' is not key=value", "anchors, tail"],
    "speed-24:tail": ["'tail' is not key=value"],
    "speed-24:tail=": ["'tail=' is not key=value"],
    "speed-24:=1": ["'=1' is not key=value"],
    "speed-24:tail=1,": ["'' is not key=value"],
    "speed-24:tail=1,,anchors=1": ["'' is not key=value"],
    "speed-24:tail==1": ["tail must be an integer of at least 1, got '=1'"],
    "speed-24:tail=1:anchors=1": ["tail must be an integer of at least 1, got '1:anchors=1'"],
    "speed-24:tail=0": ["tail must be an integer of at least 1, got 0"],
    "speed-24:tail=-1": ["tail must be an integer of at least 1, got '-1'"],
    "speed-24:anchors=-1": ["anchors must be an integer of at least 0, got '-1'"],
    "speed-24:anchors=-0": ["anchors must be an integer"],
    "speed-24:anchors=+1": ["anchors"],
    "speed-24:anchors=x": ["anchors must be an integer of at least 0, got 'x'"],
    "speed-24:tail=1,tail=1": ["parameter 'tail' is given twice"],
    "speed-24:anchor=1": ["unknown parameter 'anchor'; did you mean anchors?", "anchors, tail"],
    "speed-24:cutoff=24": ["unknown parameter 'cutoff'"],
    "speed-24+": ["empty part"],
    "+": ["empty part"],
    "speed-24++fier-64": ["empty part"],
    "full+speed-24": ["drop it or the rest"],
    "full+full": ["drop it or the rest"],
    "full-1": ["full takes no number and no parameters"],
    "full:": ["full takes no number and no parameters"],
    "fastkv-24": ["fastkv takes no number", "tsp_layer"],
    "speed-24+speed-24": ["two answers on the propagate axis, speed-24 and speed-24"],
    "fastkv:kv_rate=1+fastkv:tsp_rate=1": ["fastkv is given twice"],
    "snapkv:kv_rate=1+snapkv:kv_rate=1": ["snapkv is given twice"],
    "speed-24+fastkv": ["two answers on the propagate axis, speed-24 and fastkv"],
    "fastkv+snapkv": ["two answers on the retain axis, fastkv and snapkv"],
    "fier-64+quest-64": ["two answers on the retrieve axis"],
    "fastkv:tsp_rate=0": ["tsp_rate must be a number in (0, 1], got 0"],
    "fastkv:tsp_rate=1.01": ["tsp_rate must be a number in (0, 1], got 1.01"],
    "fastkv:kv_rate=-0.1": ["kv_rate must be a number in (0, 1], got '-0.1'"],
    "fastkv:kv_rate=nan": ["kv_rate must be a number in (0, 1], got 'nan'"],
    "fastkv:kv_rate=inf": ["kv_rate must be a number in (0, 1], got 'inf'"],
    "fastkv:kv_rate=1e-999": ["kv_rate must be a number in (0, 1], got '1e-999'"],
    "fastkv:kv_rate=0e-999": ["kv_rate must be a number in (0, 1], got 0.0"],
    "fastkv:kv_rate=1e400": ["kv_rate must be a number in (0, 1], got '1e400'"],
    "fier-1e-400": ["must be an integer from 32 to 8192, got '1e-400'"],
    "fastkv:tsp_reduction=softmax": ["tsp_reduction must be one of sum, max, got 'softmax'"],
    "fastkv:tsp_layer=-1": ["tsp_layer must be an integer of at least 0 or auto, got '-1'"],
    "fastkv:tsp_layer=1.5": ["tsp_layer"],
    "fastkv:window=0": ["window must be an integer from 1 to 64, got 0"],
    "fastkv:kernel=0": ["kernel must be an odd integer from 1 to 127, got 0"],
    "snapkv:kernel=4": ["kernel must be an odd integer from 1 to 127, got 4"],
    "fastkv:kv_rate=0.1,kv_budget=512": ["kv_rate and kv_budget both", "keep one"],
    "snapkv:kv_budget=7": ["kv_budget must be at least the window of 8 tokens, got 7"],
    "snapkv:kv_budget=0": ["kv_budget must be an integer of at least 1, got 0"],
    "snapkv:kv_budget=512,kv_floor=64": ["kv_floor is the least that a rate keeps", "keep one"],
    "snapkv:kv_floor=-1": ["kv_floor must be an integer of at least 0, got '-1'"],
    "structkv:kv_budget=7": ["kv_budget must be at least the window of 8 tokens, got 7"],
    "structkv:kv_budget=64,kv_rate=0.1": ["kv_rate and kv_budget both"],
    "structkv:struct_rate=0": ["struct_rate must be a number in (0, 1]"],
    "structkv:decay=1.5": ["decay must be a number in (0, 1], got 1.5"],
    "structkv:pivot=offline": ["an integer of at least 0 or calibrated or online, got 'offline'"],
    "structkv:granularity=page": ["granularity must be one of token, block, got 'page'"],
    "structkv:pivot=online,kv_rate=0.3": ["pivot=online needs kv_rate <= struct_rate"],
    "structkv:min_layer=3": ["have effect with pivot=online and"],
    "structkv:granularity=block,pivot=online": ["pivot=online cannot be had", "pivot=<int>"],
    "structkv:heads=each": ["heads must be one of own, shared, got 'each'"],
    "structkv:granularity=block,heads=own": ["leave out heads=own or use granularity=token"],
    "structkv:granularity=block,kernel=1": ["leave out kernel or use granularity=token"],
    "structkv:kernel=7,granularity=block": ["kernel pools the scores of single entries"],
    "structkv:kernel=6": ["kernel must be an odd integer from 1 to 127, got 6"],
    "structkv:kernel=129": ["kernel must be an odd integer from 1 to 127, got 129"],
    "structkv:entropy_weight=2": ["entropy_weight must be a number in [0, 1], got 2"],
    "structkv:entropy_weight=0,sparsity_weight=0,variance_weight=0": ["must be above 0"],
    "streamingllm:sinks=0": ["sinks must be an integer of at least 1, got 0"],
    "streamingllm:recent=0": ["recent must be an integer of at least 1, got 0"],
    "streamingllm:recent=20,kv_rate=0.1": ["recent and kv_rate both say how many", "keep one"],
    "streamingllm:kv_floor=100": ["give kv_rate too"],
    "streamingllm:kv_rate=0": ["kv_rate must be a number in (0, 1], got 0"],
    "fier-31": ["BUDGET must be an integer from 32 to 8192, got 31; for example fier-1024"],
    "fier-9000": ["BUDGET must be an integer from 32 to 8192, got 9000"],
    "fier-64:group=33": ["group must be one of 32, 64, 128, 256, got 33"],
    "fier-1024:group=16": ["group must be one of 32, 64, 128, 256, got 16"],
    "fier-1024:group=32.0": ["group must be one of 32, 64, 128, 256, got 32.0"],
    "fier-1024:group=96": ["group must be one of 32, 64, 128, 256, got 96"],
    "fier-64:group=128": ["group must be no larger than the budget of 64 tokens, got 128"],
    "fier-32:group=64": ["group must be no larger than the budget of 32 tokens, got 64"],
    "fier-255:group=256": ["group must be no larger than the budget of 255 tokens, got 256"],
    "quest-32:page=64": ["page must be no larger than the budget of 32 tokens, got 64"],
    "fier-64:dense_below=-1": ["dense_below must be an integer of at least 0 or auto, got '-1'"],
    "fier-64:reduction=mean": ["reduction must be one of max, sum, softmax, got 'mean'"],
    "fier-64:reduction=1": ["reduction must be one of"],
    "quest-8": ["BUDGET must be an integer from 32 to 8192, got 8; for example quest-1024"],
    "quest-9000": ["BUDGET must be an integer from 32 to 8192, got 9000"],
    "quest-64:page=0": ["page must be one of 8, 16, 32, 64, got 0"],
    "quest-64:page=12": ["page must be one of 8, 16, 32, 64, got 12"],
    "quest-64:reduction=mean": ["reduction must be one of max, sum, softmax, got 'mean'"],
    "quest-64:page=65": ["page must be one of 8, 16, 32, 64, got 65"],
}


@pytest.mark.parametrize("name", VALID)
def test_valid(name: str) -> None:
    canonical, policy = VALID[name]
    assert parse_policy(name) == policy
    assert str(policy) == canonical
    assert parse_policy(canonical) == policy
    assert hash(parse_policy(canonical)) == hash(policy)


@pytest.mark.parametrize("name", INVALID)
def test_invalid(name: str) -> None:
    with pytest.raises(PolicyError) as error:
        parse_policy(name)
    for wanted in INVALID[name]:
        assert wanted in str(error.value)


@pytest.mark.parametrize("value", [None, 24, 2.4, True, b"speed-24", ["full"], {}, object()])
def test_not_a_string(value: object) -> None:
    with pytest.raises(PolicyError, match=f"a policy is a string.*got {type(value).__name__}"):
        parse_policy(value)  # type: ignore[arg-type]


def _malformed(rng: random.Random) -> str:
    """A string outside the grammar, whatever the draw: no mutation here can yield a valid name."""
    name = rng.choice([n for n in VALID if n != "full"])
    cut = rng.randrange(len(name) + 1)
    separators = [i for i, c in enumerate(name) if c in "-:=,+"] or [len(name)]
    at = rng.choice(separators)
    foreign = chr(rng.choice([*range(0x21), *b"!#$%&/;<>?@ABZ[]^`{|}~", *range(0x7F, 0x3000)]))
    noise = [chr(b) for b in rng.randbytes(rng.randrange(40))]
    noise.insert(rng.randrange(len(noise) + 1), foreign)
    return rng.choice(
        [
            name[:cut] + foreign + name[cut:],  # a character that no name has
            "".join(noise),  # bytes, one of them such a character
            name[: at + 1] + name[at : at + 1] + name[at + 1 :] + ":",  # doubled and trailing
            name[:at] + rng.choice(["+", ":", ",", "="]),  # cut short at a separator
            rng.choice("+:=,-") + name,  # a separator first
            name[0] + name,  # a misspelt method
            name + "+" + name,  # two answers on one axis
            name + rng.choice(["+full", "+", "+-", ":x=1", ",tail", "=1=", "+nosuch-1"]),
        ]
    )


def test_fuzz_is_never_valid_and_never_crashes() -> None:
    rng = random.Random(20)
    for _ in range(5000):
        text = _malformed(rng)
        # Not pytest.raises: another exception type must name the text that caused it.
        try:
            policy = parse_policy(text)
        except PolicyError as error:
            assert len(str(error)) > 20
        except Exception as error:
            pytest.fail(f"{text!r} raised {error!r}")
        else:
            pytest.fail(f"{text!r} passed as {policy}")


def test_round_trip_of_random_policies() -> None:
    rng = random.Random(21)
    fractions = [1, 1e-6, 0.05, 0.1, 0.2, 1 / 3, 0.999999999]
    for _ in range(500):
        rate, other = rng.choices(fractions, k=2)
        snapkv = SnapKV(kv_rate=rate) if rng.random() < 0.5 else SnapKV(kv_budget=77)
        speed = Speed(rng.randrange(1, 99), rng.randrange(3), rng.randrange(1, 4))
        layer: int | str = 3 if rng.random() < 0.5 else "auto"
        fastkv = FastKV(snapkv.kv_rate, snapkv.kv_budget, tsp_layer=layer, tsp_rate=other)
        wide, narrow = max(rate, other), min(rate, other)
        limit: int | str = 3 if layer == 3 and wide < 1 else "auto"
        structkv = StructKV("online", wide, narrow, max_layer=limit)
        streamingllm = StreamingLLM(rng.randrange(1, 9))
        lower: list[list[Method]] = [[speed, snapkv], [fastkv], [structkv], [streamingllm], []]
        upper: list[list[Method]] = [[FIER(rng.randrange(64, 999))], [Quest(64, 8)], []]
        policy = KVPolicy.of([*rng.choice(upper), *rng.choice(lower)])
        assert parse_policy(str(policy)) == policy


def test_python_calls_are_checked_like_names() -> None:
    for wrong in (0, -1, 2.0, True, None, "24"):
        with pytest.raises(PolicyError, match="K must be an integer of at least 1"):
            Speed(wrong)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=re.escape("tsp_rate must be a number in (0, 1]")):
        FastKV(tsp_rate=float("nan"))
    with pytest.raises(PolicyError, match="speed-24 does not answer retain"):
        KVPolicy(retain=Speed(24))  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="fastkv answers retain too"):
        KVPolicy(propagate=FastKV())
    with pytest.raises(PolicyError, match="fastkv answers retain too"):
        KVPolicy(propagate=FastKV(), retain=SnapKV())
    with pytest.raises(PolicyError, match="fastkv is given twice"):
        KVPolicy(propagate=FastKV(kv_rate=1), retain=FastKV(tsp_rate=1))


def test_a_layer_can_be_filled_in_later() -> None:
    for fastkv in (FastKV(), FastKV(kv_budget=64), FastKV(kv_rate=0.3)):
        assert dataclasses.replace(fastkv, tsp_layer=15).kv_budget == fastkv.kv_budget
    assert dataclasses.replace(StructKV(), pivot=3).pivot == 3
    blocks = StructKV(granularity="block")
    assert str(dataclasses.replace(blocks, pivot=3)) == "structkv:pivot=3,granularity=block"

"""A request's policy is checked where vLLM admits it, and costs nothing in the worker."""

import difflib
import pickle
import random
import re
import string
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.request_checks import MODEL, params, settings_of, validator
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsProcessor,
    build_custom_logits_processors_params_validator,
)

from vllm_kvx.config.settings import KVSettings
from vllm_kvx.server import request_check
from vllm_kvx.server.request_check import class_path


@pytest.mark.parametrize("name", ["full", "speed-4", "speed-4:tail=2", "speed-4:anchors=0,tail=3"])
def test_what_fits_passes(name: str) -> None:
    validator("speed-4")(params(name))
    validator("full", "speed-4")(params(name))


def test_no_policy_of_its_own_passes() -> None:
    for check in (validator("speed-4"), validator("full")):
        check(params())
        check(SamplingParams(extra_args={"kv_transfer_params": {}, "session_id": "a"}))
        check(SamplingParams(extra_args={"kv_policy": None}))
        check(SamplingParams(extra_args={"cache_policy": 2, "policies": 1, "kvx": 3, 7: 1}))
        check(SamplingParams(extra_args={"kv_cache_report_mode": "incremental"}))


def test_many_and_long_keys_of_others_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    close = difflib.get_close_matches

    def counted(word: str, *args: Any, **kwargs: Any) -> list[str]:
        compared.append(word)
        return close(word, *args, **kwargs)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    check = validator("speed-4")
    check(SamplingParams(extra_args={f"kvothr{i}": i for i in range(200_000)}))
    assert 0 < len(compared) <= 64
    compared.clear()
    check(SamplingParams(extra_args={"kvpolicy" * 100_000: 1, "temperature": 1}))
    assert not compared


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("speed-5", "does not fit this server.*add speed-5 to its --kv-layout"),
        ("speed-8", "8 layers"),
        ("sped-4", "did you mean speed-K"),
        ("speed-4:tail=0", "tail"),
        ("", "empty"),
        ("speed-4 ", "whitespace"),
        (4, "must be a string.*4"),
        (True, "must be a string"),
        (["speed-4"], "must be a string"),
        ({"a": 1}, "must be a string"),
    ],
)
def test_what_does_not_fit_is_refused(name: Any, names: str) -> None:
    with pytest.raises(VLLMValidationError, match=names):
        validator("speed-4")(params(name))


@pytest.mark.parametrize(
    ("name", "names"),
    [
        (
            "structkv:pivot=3,kv_rate=1+streamingllm:recent=1020",
            "chosen by data: compose it with speed-K",
        ),
        (
            "fastkv:tsp_layer=3,kv_rate=1+structkv:pivot=3,struct_rate=1,kv_rate=0.1",
            "score keys differently",
        ),
        (
            "fastkv:tsp_layer=3,kv_rate=1+snapkv:kv_rate=0.1,window=4",
            "give both the same window and kernel",
        ),
        (
            "fastkv:tsp_layer=3,kv_rate=1+snapkv:kv_rate=0.1,kernel=5",
            "give both the same window and kernel",
        ),
        (
            "structkv:pivot=3,kv_rate=1+snapkv:kv_rate=0.1,window=4",
            "give both the same window and kernel",
        ),
        (
            "speed-4+structkv:pivot=5,struct_rate=1,kv_rate=0.1,granularity=block",
            "ranked at layer 5",
        ),
    ],
)
def test_methods_that_do_not_go_together_are_refused(name: str, names: str) -> None:
    check = validator("speed-4", "fastkv:tsp_layer=3", "snapkv:window=16")
    check(params("fastkv:tsp_layer=3,kv_rate=1+snapkv:kv_rate=0.5"))
    check(params("structkv:pivot=3,kv_rate=1+snapkv:kv_rate=0.1"))
    with pytest.raises(VLLMValidationError, match=names):
        check(params(name))


@pytest.mark.parametrize("name", ["fier-64", "fier-100:dense_below=0", "speed-4+fier-128", "full"])
def test_retrieval_within_the_sidecar_passes(name: str) -> None:
    validator("fier-128", "speed-4")(params(name))


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("fier-129", "budgets of up to 128.* needs a sidecar .*budgets of up to 129"),
        ("fier-128:group=64", "groups of 32 .* needs a sidecar .*groups of 64"),
        ("fier-128:reduction=softmax", r"\(max, .* needs a sidecar .*\(softmax, "),
        ("quest-128", "1-bit keys .* needs a sidecar of bounds of pages of 16"),
        ("speed-4+fier-64", "needs a split at layer 4: start"),
    ],
)
def test_retrieval_beyond_the_sidecar_is_refused(name: str, names: str) -> None:
    with pytest.raises(VLLMValidationError, match=names) as error:
        validator("fier-128")(params(name))
    message = str(error.value)
    validator(message.partition("--kv-policy ")[2].split(",")[0].strip())(params(name))


@pytest.mark.parametrize("name", ["fier-129", "speed-4+fier-64", "speed-4+fier-129"])
def test_room_can_be_made_for_larger_budgets(name: str) -> None:
    with pytest.raises(VLLMValidationError, match=r", or add") as error:
        validator("fier-128")(params(name))
    check = validator(
        "fier-128", re.split(r", or add (\S+) to its --kv-layout", str(error.value))[1]
    )
    check(params(name))
    check(params("fier-128"))


@pytest.mark.parametrize(
    "name", ["quest-96", "fier-96:group=64", "fier-96:reduction=softmax", "quest-512"]
)
def test_no_room_can_be_made_for_another_sidecar(name: str) -> None:
    check = validator("fier-128")
    with pytest.raises(VLLMValidationError, match=r"request \S+, which fits") as error:
        check(params(name))
    assert "kv-layout" not in str(error.value)
    check(params(str(error.value).split("request ")[1].split(",")[0]))
    with pytest.raises(ValueError, match="one server holds one sidecar, but fier-128 needs"):
        validator("fier-128", name)


def test_retrieval_needs_a_sidecar() -> None:
    with pytest.raises(VLLMValidationError, match=r"no sidecar; .*--kv-policy fier-64, or add"):
        validator("speed-4")(params("fier-64"))
    with pytest.raises(VLLMValidationError, match=r"full alone: .*--kv-policy quest-64, or make"):
        validator("full")(params("quest-64"))


def test_a_full_server_runs_full_alone() -> None:
    check = validator("full")
    check(params("full"))
    with pytest.raises(
        VLLMValidationError,
        match=r"--kv-policy speed-4, or make room with --kv-policy full --kv-layout speed-4",
    ):
        check(params("speed-4"))


@pytest.mark.parametrize("server", ["speed-4", "full", "fier-64"])
def test_an_operator_may_let_requests_choose_nothing(server: str) -> None:
    check = validator(server, "speed-4", "quest-64" if server == "full" else "full", requests="off")
    for passes in (None, server):
        check(params(passes))
    check(SamplingParams(extra_args={"kv_policy": None}))
    for name in {"full", "speed-4", "speed-4:tail=2"} - {server}:
        with pytest.raises(VLLMValidationError, match=rf"{name}: .*every request under {server}, "):
            check(params(name))
    with pytest.raises(VLLMValidationError, match="did you mean speed-K"):
        check(params("sped-4"))


def test_an_operator_may_let_requests_choose_from_a_list() -> None:
    check = validator("speed-4", "speed-4:tail=2", "fier-64", requests="list")
    for passes in (None, "speed-4", "speed-4:anchors=1", "speed-4:tail=2", "fier-64"):
        check(params(passes))
    allowed = r"lets requests name these policies alone: speed-4, speed-4:tail=2, fier-64 \("
    for name in ("full", "fier-32", "speed-4:tail=3", "speed-4+fier-64", "speed-5"):
        with pytest.raises(VLLMValidationError, match=allowed):
            check(params(name))
    validator("speed-4", "full", requests="list")(params("full"))


def test_full_is_no_advice_where_it_may_not_be_named() -> None:
    for requests, more in (("off", ["full"]), ("list", [])):
        check = validator("speed-4", *more, requests=requests)
        with pytest.raises(VLLMValidationError, match="skips some: ask without it"):
            check(params(prompt_logprobs=1))
    with pytest.raises(VLLMValidationError, match=r'send vllm_xargs={"kv_policy": "full"} too'):
        validator("speed-4", "full", requests="list")(params(prompt_logprobs=1))


@pytest.mark.parametrize(
    "key", ["kv_polcy", "kv-policy", "kvpolicy", "KV_policy", "kv_policies", "kvPolicy"]
)
def test_a_misspelled_key_is_refused(key: str) -> None:
    for more in ({}, {"kv_policy": "speed-4"}, {"kv_policy": None}):
        with pytest.raises(VLLMValidationError, match=f"{key}.*did you mean 'kv_policy'"):
            validator("speed-4")(SamplingParams(extra_args={key: "full", **more}))


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("policy", "unknown key 'policy' in vllm_xargs; did you mean 'kv_policy'"),
        ("kv_rate", "'kv_rate' in vllm_xargs is not read: parameters stand in the policy's name"),
        ("KV-layout", "'KV-layout' in vllm_xargs is not read: kv_layout is set when the server"),
        ("kv_drafts", "not read: a server sets kv_drafts for its own processes: leave it out"),
        ("kv_other", "unknown key 'kv_other' in vllm_xargs: of keys with kv_ it takes kv_policy, "),
        ("kv_" + "x" * 9000, "x'... .9,003 characters. in vllm_xargs"),
    ],
)
def test_keys_that_no_request_has(key: str, says: str) -> None:
    for more in ({}, {"kv_policy": "speed-4"}, {f"x{i}": i for i in range(100)}):
        with pytest.raises(VLLMValidationError, match=says) as error:
            validator("speed-4")(SamplingParams(extra_args={**more, key: None}))
        assert len(str(error.value)) < 300


def test_python_is_told_of_its_own_arguments() -> None:
    def said(**asked: Any) -> str:
        path = class_path(settings_of("full"), MODEL, in_python=True)
        check = build_custom_logits_processors_params_validator([path])
        with pytest.raises(VLLMValidationError) as error:
            check(SamplingParams(**asked))
        return str(error.value)

    assert "unknown key 'policy' in extra_args; did you" in said(extra_args={"policy": "full"})
    assert "when the server starts, in additional_config, and" in said(extra_args={"kv_layout": []})
    assert (
        'start it with additional_config={"kv_policy": "speed-4:tail=2"}, or make room with '
        'additional_config={"kv_policy": "full", "kv_layout": ["speed-4:tail=2"]}'
    ) in said(extra_args={"kv_policy": "speed-4:tail=2"})


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 1}, {"prompt_logprobs": 0}])
def test_prompt_logprobs_need_every_layer(asked: dict) -> None:
    on_speed, on_full = validator("speed-4"), validator("full", "speed-4")
    for check, name in ((on_speed, None), (on_speed, "speed-4"), (on_full, "speed-4")):
        with pytest.raises(VLLMValidationError, match=r'prompt_logprobs.*"kv_policy": "full"'):
            check(params(name, **asked))
    on_speed(params("full", **asked))
    on_full(params(**asked))


def test_prompt_logprob_token_ids_too() -> None:
    asked = SimpleNamespace(extra_args=None, prompt_logprobs=None, prompt_logprob_token_ids=[1])
    with pytest.raises(VLLMValidationError, match="prompt_logprob_token_ids"):
        validator("speed-4")(asked)


@pytest.mark.parametrize("drafts", [False, True])
def test_logprobs_of_named_tokens_need_steps_without_drafts(drafts: bool) -> None:
    settings = settings_of("speed-4")
    settings = replace(settings, layout=replace(settings.layout, drafts=drafts))
    path = class_path(settings, MODEL)
    check = build_custom_logits_processors_params_validator([path])
    check(params(logprobs=2))
    if not drafts:
        check(params(logprob_token_ids=[3]))
        return
    with pytest.raises(VLLMValidationError, match="logprob_token_ids: this server drafts tokens"):
        check(params(logprob_token_ids=[3]))


def test_random_strings_never_crash_and_never_pass() -> None:
    rng = random.Random(0)
    check = validator("speed-4")
    alphabet = "speedfulkvtr0123456789-+:=,. " + string.punctuation + "é\n\0"
    for _ in range(200):
        name = "".join(rng.choices(alphabet, k=rng.randrange(40)))
        with pytest.raises(VLLMValidationError):
            check(params(name))


SERVERS = ("full", "speed-4", "speed-5", "speed-4:tail=2", "fier-64", "quest-64", "fier-65")


def test_the_name_carries_the_server() -> None:
    paths = {class_path(settings_of(p), MODEL) for p in SERVERS}
    paths |= {class_path(settings_of("speed-4", requests=r), MODEL) for r in ("off", "list")}
    assert len(paths) == len(SERVERS) + 2
    for path in paths:
        module, name = path.split(":")
        assert module == request_check.__name__
        cls = getattr(request_check, name)
        assert class_path(cls.settings, cls.model_name) == path
        assert issubclass(cls, LogitsProcessor)
        assert cls is getattr(request_check, name)
        assert pickle.loads(pickle.dumps(cls)) is cls
    with pytest.raises(AttributeError):
        request_check.nothing  # noqa: B018


def test_a_request_is_read_with_all_that_was_measured() -> None:
    """Else the server's own policy would be another, which its operator does not allow."""
    measured = {"tsp_layer": 3, "tsp_rate": 0.4, "tsp_reduction": "max"}
    config = {"kv_policy": "fastkv", "kv_measured": measured, "kv_request_policies": "list"}
    settings = KVSettings.of(config, num_layers=8)
    assert str(settings.policy) == "fastkv:tsp_layer=3,tsp_rate=0.4,tsp_reduction=max"
    check = build_custom_logits_processors_params_validator([class_path(settings, MODEL)])
    check(params("fastkv"))
    check(params(str(settings.policy)))
    for other in ("fastkv:tsp_rate=0.2,kv_rate=0.1", "fastkv:tsp_layer=3,kv_rate=0.1"):
        with pytest.raises(VLLMValidationError):
            check(params(other))


def test_a_bare_name_is_refused_but_for_the_servers_own() -> None:
    """A server tells canonical names, in which a paper's rates are left out."""
    check = validator("snapkv:kv_rate=0.1", "fastkv:tsp_layer=3")
    check(params("snapkv"))
    check(params("snapkv:kv_rate=0.1"))
    for other in ("knorm", "criticalkv"):
        with pytest.raises(VLLMValidationError, match=f"{other} does not say how much stays"):
            check(params(other))
    with pytest.raises(VLLMValidationError, match="snapkv does not say how much stays"):
        validator("fastkv:tsp_layer=3")(params("snapkv"))


def test_two_engines_in_one_process_do_not_mix() -> None:
    four, five = validator("speed-4"), validator("speed-5")
    four(params("speed-4"))
    five(params("speed-5"))
    with pytest.raises(VLLMValidationError):
        four(params("speed-5"))
    with pytest.raises(VLLMValidationError):
        five(params("speed-4"))


def test_the_worker_skips_it() -> None:
    name = class_path(settings_of("speed-4"), MODEL).split(":")[1]
    processor = getattr(request_check, name)(None, None)
    assert processor.add_request(0, params("full")) is False
    logits = object()
    assert processor.apply(logits, None) is logits

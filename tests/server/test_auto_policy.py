"""`--kv-policy auto`: how it is written, what it stands for, and who is told."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest
from support.configs import engine_args
from test_status import Engine, serve
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_kvx.config.flags import merge_flags
from vllm_kvx.config.settings import AUTO_KEY, KVSettings
from vllm_kvx.policy.auto import AUTO, FALLBACK, Auto, parse_auto
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records import recommendation as records
from vllm_kvx.records.model_key import ModelIdentity, model_name
from vllm_kvx.records.recommendation import Recommendation, Row
from vllm_kvx.server.auto_policy import as_judged, choose
from vllm_kvx.server.evaluation_notice import EvaluationNotice
from vllm_kvx.server.request_check import check_request
from vllm_kvx.server.validate import identity_of

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}
MODEL = ModelIdentity("org/m", CONFIG)
GAINS = {"ttft": 1.0, "tpot": 2.0, "pool": 5.0, "requests": 1.8}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path))
    return tmp_path


def row(policy: str, low: float, **changes: Any) -> Row:
    verdict = "kept" if low >= 0.97 else "lost"
    return Row(policy, (min(low + 0.01, 1.0), low, 1.0), 256, 200.0, GAINS | changes, verdict)


def record(*rows: Row, of: ModelIdentity = MODEL, **changes: Any) -> Recommendation:
    """A record of a model with these rows, saved."""
    found = Recommendation(
        key=of.key,
        model=model_name(of.path),
        keep=0.97,
        workload={"input": 32000, "output": 1000, "concurrency": 16},
        device="h100",
        kv_cache_dtype="",
        tasks=["niah_single_2"],
        rows=rows or (row("snapkv:kv_rate=0.2", 0.9), row("snapkv:kv_rate=0.4", 0.98)),
        chosen="snapkv:kv_rate=0.4",
        level=0.99,
        versions={},
        command="vllm-kvx recommend org/m",
        date="2026-11-27T03:04:05+00:00",
    )
    found = replace(found, **changes)
    records.save(found)
    return found


def runs_all(name: str) -> None:
    return None


# What it is written as.


def test_it_is_written_with_a_share_or_without() -> None:
    assert parse_auto("auto") == Auto() and str(Auto()) == "auto"
    assert parse_auto("auto:keep=0.9") == Auto(0.9) and str(Auto(0.9)) == "auto:keep=0.9"
    assert parse_auto("auto:keep=1") == Auto(1.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("auto:keep=1.2", "above 0 and at most 1, such as 0.97; got 1.2"),
        ("auto:keep=0", "above 0 and at most 1"),
        ("auto:keep=most", "above 0 and at most 1"),
        ("auto:keep", "above 0 and at most 1, such as 0.97; got nothing"),
        ("auto:keep=0.9,input=3", "above 0 and at most 1"),
        ("auto:", "write auto or auto:keep=0.97"),
        ("auto:share=0.9", "auto has the parameter keep alone"),
    ],
)
def test_what_is_no_share(text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PolicyError, match=says):
        parse_auto(text)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-policy", text])
    assert says in " ".join(capsys.readouterr().err.split())


def test_auto_is_lower_case(capsys: pytest.CaptureFixture[str]) -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-policy", "Auto:keep=0.9"])
    assert "lower case; write 'auto:keep=0.9'" in " ".join(capsys.readouterr().err.split())


def test_flags_and_configuration_may_both_say_it() -> None:
    assert merge_flags("auto", None, {}) == {"kv_policy": "auto"}
    assert merge_flags("auto:keep=0.9", None, {"kv_policy": "auto:keep=0.90"})
    for other in ("fier-2048", "auto:keep=0.8"):
        with pytest.raises(ValueError, match="differ"):
            merge_flags("auto", None, {"kv_policy": other})
    # Further API servers read the flag again, beside what their parent chose.
    chosen = {"kv_policy": "fier-2048", AUTO_KEY: {"named": "auto"}}
    assert merge_flags("auto", None, chosen) == chosen
    with pytest.raises(ValueError, match="differ"):
        merge_flags("auto:keep=0.9", None, chosen)


# What it stands for.


def test_the_best_that_keeps_the_answers_is_served() -> None:
    record()
    found = choose(Auto(), MODEL, runs_all)
    assert (found.policy, found.source, found.keep) == ("snapkv:kv_rate=0.4", "measured", 0.97)
    assert found.kept == (0.99, 0.98, 1.0)
    assert "kept 99.0% [98.0-100.0] of this model's right answers" in found.says
    assert "256 prompts, 2026-11-27" in found.says and "1.80x in requests/s" in found.says
    # A lower share has a better policy, and a higher one has none.
    assert choose(Auto(0.9), MODEL, runs_all).policy == "snapkv:kv_rate=0.2"
    found = choose(Auto(0.99), MODEL, runs_all)
    assert (found.policy, found.source) == (FALLBACK, "not measured")
    assert "no policy was shown to keep 99.0%" in found.says


def test_what_a_server_cannot_run_is_passed_over() -> None:
    record(row("speed-6", 0.98), row("snapkv:kv_rate=0.4", 0.98))
    found = choose(Auto(), MODEL, lambda name: "no ranges" if "speed" in name else None)
    assert found.policy == "snapkv:kv_rate=0.4"
    assert found.says.endswith("since this server cannot run it: speed-6 (no ranges)")
    found = choose(Auto(), MODEL, lambda name: None if "fier" in name else "no room")
    assert (found.policy, found.source) == (FALLBACK, "not measured")
    assert "cannot run what was shown to keep 97.0%: speed-6 (no room); snapkv" in found.says
    found = choose(Auto(), MODEL, lambda name: "full alone")
    assert (found.policy, found.source) == ("full", "not measured")
    assert f"cannot run {FALLBACK} (full alone)" in found.says


def test_without_a_record_the_command_that_makes_one_is_named() -> None:
    found = choose(Auto(0.9), MODEL, runs_all)
    assert (found.policy, found.source, found.kept) == (FALLBACK, "not measured", None)
    assert found.says.endswith("`vllm-kvx recommend org/m --keep 0.9`")
    assert choose(Auto(), MODEL, runs_all).keep == 0.97


def test_another_kv_cache_was_not_measured() -> None:
    record(kv_cache_dtype="fp8")
    found = choose(Auto(), MODEL, runs_all)
    assert found.policy == FALLBACK and "nothing was measured of this model" in found.says
    found = choose(Auto(), replace(MODEL, kv_cache_dtype="fp8"), runs_all)
    assert found.policy == "snapkv:kv_rate=0.4"


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        {"rows": [{"policy": "snapkv"}]},
        {"rows": [{**row("sped-3", 0.98).__dict__}]},
        {"rows": None},
        {"keep": 1.2},
        {"workload": {}},
        {"kv_floor": 1},
        {"key": "another"},
    ],
)
def test_a_damaged_record_is_none(cache: Path, damage: Any, caplog: Any) -> None:
    assert records.load(MODEL.key) is None
    record()
    saved = records.load(MODEL.key)
    assert saved is not None and saved.rows[1].kept == (0.99, 0.98, 1.0)
    (path,) = (cache / "recommendation").iterdir()
    if isinstance(damage, dict):
        damage = json.dumps(json.loads(path.read_text()) | damage)
    path.write_text(damage)
    assert records.load(MODEL.key) is None
    assert choose(Auto(), MODEL, runs_all).policy == FALLBACK


# A server's configuration.


@pytest.fixture
def model(make_config: Callable[..., Any]) -> ModelIdentity:
    """The one that `make_config` configures."""
    return identity_of(make_config())


def test_a_server_reads_a_plain_name(make_config: Callable[..., Any], model: ModelIdentity) -> None:
    record(row("speed-3", 0.98), of=model)
    config = make_config(AUTO, dtype="float32")
    assert config.additional_config["kv_policy"] == "speed-3"
    chosen = config.additional_config[AUTO_KEY]
    assert (chosen["named"], chosen["policy"], chosen["source"]) == (AUTO, "speed-3", "measured")
    settings = KVSettings.from_vllm_config(config)
    assert settings is not None and str(settings.policy) == "speed-3"


def test_a_server_in_python_leaves_its_callers_dictionary(llama: str, model: ModelIdentity) -> None:
    given = {"kv_policy": AUTO}
    record(row("speed-3", 0.98), of=model)
    config = EngineArgs(**engine_args(llama), additional_config=given).create_engine_config()
    assert config.additional_config["kv_policy"] == "speed-3" and given == {"kv_policy": AUTO}


def test_what_else_is_configured_decides_too(
    make_config: Callable[..., Any], model: ModelIdentity
) -> None:
    # A cut that a model of eight layers has not, and entries that its CPU cannot address.
    rows = (row("speed-30", 0.98), row("snapkv:kv_rate=0.4", 0.98), row("speed-3", 0.98))
    record(*rows, of=model)
    config = make_config(AUTO, dtype="bfloat16")
    chosen = config.additional_config[AUTO_KEY]
    if current_platform.is_cpu():
        assert chosen["policy"] == "speed-3" and "set --dtype float32" in chosen["says"]
    assert "speed-30 (" in chosen["says"]


def test_a_trial_leaves_no_trace(make_config: Callable[..., Any], model: ModelIdentity) -> None:
    # Blocks would be made whole groups for the first, which does not run.
    record(row("speed-30+fier-512", 0.98), row("speed-3", 0.98), of=model)
    plain = make_config("speed-3", dtype="float32")
    config = make_config(AUTO, dtype="float32")
    assert config.additional_config["kv_policy"] == "speed-3"
    assert config.cache_config.block_size == plain.cache_config.block_size


def test_without_a_record_it_is_retrieval(make_config: Callable[..., Any]) -> None:
    config = make_config(AUTO, dtype="float32")
    assert config.additional_config["kv_policy"] == FALLBACK
    assert config.additional_config[AUTO_KEY]["source"] == "not measured"


@pytest.mark.parametrize("choice", [3, {}, {"named": "auto", "policy": "speed-3"}])
def test_only_a_server_says_what_it_chose(make_config: Callable[..., Any], choice: Any) -> None:
    with pytest.raises(ValueError, match="kv_auto is what a server sets"):
        make_config("speed-3", additional_config={AUTO_KEY: choice})


def test_what_was_recommended_was_measured() -> None:
    notice = EvaluationNotice(MODEL)
    assert not notice.as_json(parse_policy("snapkv:kv_rate=0.4"))["measured"]
    record(row("snapkv:kv_rate=0.4", 0.98), row("fier-512", 0.98))
    notice = EvaluationNotice(MODEL)
    found = notice.as_json(parse_policy("snapkv:kv_rate=0.4"))
    assert found["measured"] and found["n"] == 256
    assert found["says"].startswith("snapkv:kv_rate=0.4: kept 99.0% [98.0-100.0] of this model's")
    assert notice.as_json(parse_policy("fier-512"))["measured"]
    assert not notice.as_json(parse_policy("snapkv:kv_rate=0.2"))["measured"]
    over_fp8 = EvaluationNotice(replace(MODEL, kv_cache_dtype="fp8"))
    assert not over_fp8.as_json(parse_policy("snapkv:kv_rate=0.4"))["measured"]


def test_what_is_no_share_ends_a_start(make_config: Callable[..., Any]) -> None:
    with pytest.raises(PolicyError, match="above 0 and at most 1"):
        make_config("auto:keep=1.2")


# Who is told.


def test_the_route_and_the_metrics_say_what_was_chosen() -> None:
    chosen = choose(Auto(0.9), MODEL, runs_all).as_json()

    async def main() -> None:
        engine = Engine(FALLBACK, model="auto-model", **{AUTO_KEY: chosen})
        client: httpx.AsyncClient = await serve(engine)
        answer = (await client.get("/v1/kv_policy")).json()
        assert answer["policy"] == FALLBACK and answer["auto"] == chosen
        assert answer["auto"]["named"] == "auto:keep=0.9"

    asyncio.run(main())
    labels = {"model_name": "auto-model", "policy": FALLBACK, "named": "auto:keep=0.9"}
    labels["source"] = "not_measured"
    value = prometheus_client.REGISTRY.get_sample_value("vllm_kvx:auto_policy_info", labels)
    assert value == 1


def test_a_request_may_not_name_it() -> None:
    settings = KVSettings.of({"kv_policy": FALLBACK}, 8)
    for name in ("auto", "auto:keep=0.9"):
        asked = SamplingParams(extra_args={"kv_policy": name})
        with pytest.raises(PolicyError, match=f"this server's policy is {FALLBACK}: leave"):
            check_request(settings, asked, lambda reason: None)


def test_without_weights_another_models_record_is_not_taken() -> None:
    record(model="org/other")
    found = choose(Auto(), MODEL, runs_all)
    assert (found.policy, found.source) == (FALLBACK, "not measured")
    assert "or its weights are not here yet" in found.says


def test_a_layout_that_leaves_a_layer_to_measurement_says_nothing_of_a_candidate() -> None:
    config = {"kv_layout": ["fastkv", "fier-64"]}
    assert as_judged(config, "fier-64")["kv_layout"] == ["fier-64"]
    assert as_judged({}, "fier-64") == {"kv_policy": "fier-64"}


def test_bare_names_of_an_earlier_record_are_written_out(cache: Path) -> None:
    """As they stand no server takes them, and a policy that was kept would be passed over."""
    record(row("snapkv", 0.98), row("fastkv+fier-512", 0.99))
    found = records.load(MODEL.key, "")
    assert found is not None
    assert [each.policy for each in found.rows] == [
        "snapkv:kv_rate=0.1",
        "fastkv:kv_rate=0.1+fier-512",
    ]

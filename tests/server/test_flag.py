"""--kv-policy, --additional-config and their agreement."""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_kvx.config.settings import KVSettings, policy_is_set, request_policy
from vllm_kvx.policy.layout import Layout, RetrievalLayout
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.server import measured_layers as resolve


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))


def parsed(parser: FlexibleArgumentParser, llama: str, *flags: str) -> EngineArgs:
    args = parser.parse_args(["--model", llama, "--skip-tokenizer-init", *flags])
    return AsyncEngineArgs.from_cli_args(args)


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-policy", "speed-4"],
        ["--kv_policy=speed-4"],
        ["--additional-config", '{"kv_policy": "speed-4"}'],
        ["--additional-config.kv_policy", "speed-4"],
        ["--kv-policy", "speed-4", "--additional-config", '{"kv_policy": "speed-4"}'],
    ],
)
def test_spellings_mean_the_same(parser, llama: str, flags: list[str]) -> None:
    assert parsed(parser, llama, *flags).additional_config == {"kv_policy": "speed-4"}


@pytest.mark.parametrize("flag_first", [True, False])
def test_the_flag_joins_other_keys(parser, llama: str, flag_first: bool) -> None:
    flag = ["--kv-policy", "speed-4"]
    config = ["--additional-config", '{"kv_layout": ["speed-2"], "theirs": {"a": 1}}']
    flags = [*flag, *config] if flag_first else [*config, *flag]
    assert parsed(parser, llama, *flags).additional_config == {
        "kv_layout": ["speed-2"],
        "theirs": {"a": 1},
        "kv_policy": "speed-4",
    }


def test_two_policies_are_an_error(parser, llama: str) -> None:
    config = ["--additional-config", '{"kv_policy": "speed-5"}']
    with pytest.raises(ValueError, match=r"speed-4.*speed-5.*drop one"):
        parsed(parser, llama, "--kv-policy", "speed-4", *config)
    spelled_out = ["--additional-config", '{"kv_policy": "speed-4:anchors=1"}']
    parsed(parser, llama, "--kv-policy", "speed-4", *spelled_out)


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-request-policies", "list"],
        ["--additional-config.kv_request_policies", "list"],
        ["--kv-request-policies", "list", "--additional-config.kv_request_policies", "list"],
    ],
)
def test_what_requests_may_name_has_a_flag(parser, llama: str, flags: list[str]) -> None:
    expected = {"kv_policy": "speed-4", "kv_request_policies": "list"}
    assert parsed(parser, llama, "--kv-policy", "speed-4", *flags).additional_config == expected


def test_what_requests_may_name_is_said_once(parser, llama: str) -> None:
    flags = ["--kv-policy", "speed-4", "--kv-request-policies", "off"]
    config = ["--additional-config.kv_request_policies", "list"]
    with pytest.raises(ValueError, match=r"--kv-request-policies off.*'list' differ; drop one"):
        parsed(parser, llama, *flags, *config)
    with pytest.raises(ValueError, match=r"kv_request_policies.*without kv_policy"):
        parsed(parser, llama, *flags[2:]).create_engine_config()
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-request-policies", "some"])


LAYOUT = ["speed-2:anchors=0,tail=3", "fier-64"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-layout", *LAYOUT],
        ["--kv_layout", *LAYOUT, "--kv-policy", "full"],
        ["--additional-config.kv_layout", json.dumps(LAYOUT)],
        ["--kv-layout", *LAYOUT, "--additional-config", json.dumps({"kv_layout": LAYOUT})],
    ],
)
def test_further_policies_have_a_flag(parser, llama: str, flags: list[str]) -> None:
    config = parsed(parser, llama, "--kv-policy", "full", *flags).additional_config
    assert config == {"kv_policy": "full", "kv_layout": LAYOUT}


def test_further_policies_are_said_once(parser, llama: str) -> None:
    flags = ["--kv-policy", "full", "--kv-layout", *LAYOUT]
    same = ["fier-64:group=32", "speed-2:tail=3,anchors=0", "fier-64"]
    parsed(parser, llama, *flags, "--additional-config", json.dumps({"kv_layout": same}))
    for other in (["fier-64"], [*LAYOUT, "speed-3"], [], "fier-64", ["sped-2"], [4]):
        config = ["--additional-config", json.dumps({"kv_layout": other})]
        with pytest.raises(
            ValueError, match=r"--kv-layout speed-2.*fier-64 and .*different policies; drop one"
        ):
            parsed(parser, llama, *flags, *config)
    with pytest.raises(ValueError, match=r"kv_layout without kv_policy, by flag or"):
        parsed(parser, llama, *flags[2:]).create_engine_config()


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["speed-2,fier-64"], "with blanks between them: speed-2 fier-64"),
        (["speed-2:tail=3,fier-64"], "with blanks between them: speed-2:tail=3 fier-64"),
        (["snapkv:kv_rate=0.1,window=4,kernel=3", "x"], "unknown policy 'x'"),
        (['["speed-2", "fier-64"]'], "with blanks between them, and no brackets"),
        (["speed-2", "sped-3"], "did you mean speed-K"),
        (["fastkv:kv_rate=1+streamingllm:recent=1020"], "chosen by data"),
        ([], "expected at least one argument"),
    ],
)
def test_a_bad_name_behind_the_layout_flag(parser, capsys, names: list[str], says: str) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-policy", "full", "--kv-layout", *names])
    error = capsys.readouterr().err
    assert "argument --kv-layout: " in error and says in error


@pytest.mark.parametrize("as_list", [True, False])
def test_flags_in_a_config_file(parser, llama: str, tmp_path: Path, as_list: bool) -> None:
    layout = LAYOUT if as_list else LAYOUT[0]
    file = tmp_path / "serve.yaml"
    keys = {"kv-policy": "full", "kv-layout": layout, "kv_request_policies": "list"}
    file.write_text(json.dumps(keys))  # YAML has JSON in it.
    config = parsed(parser, llama, "--config", str(file)).additional_config
    expected = {"kv_policy": "full", "kv_request_policies": "list"}
    assert config == expected | {"kv_layout": LAYOUT if as_list else LAYOUT[:1]}
    # As vLLM's own, a flag beside the file takes the file's place.
    config = parsed(
        parser, llama, "--config", str(file), "--kv-layout", "speed-3"
    ).additional_config
    assert config["kv_layout"] == ["speed-3"]


def test_further_api_servers_see_the_flag(parser, llama: str) -> None:
    # They get the namespace pickled and read it before plugins are loaded there.
    args = parser.parse_args(["--model", llama, "--skip-tokenizer-init", "--kv-policy", "speed-4"])
    AsyncEngineArgs.from_cli_args(args)
    again = pickle.loads(pickle.dumps(args))
    unwrapped = EngineArgs.from_cli_args.__func__.__wrapped__
    assert unwrapped(AsyncEngineArgs, again).additional_config == {"kv_policy": "speed-4"}
    assert AsyncEngineArgs.from_cli_args(again).additional_config == {"kv_policy": "speed-4"}


def test_further_api_servers_need_not_measure(parser, llama: str, monkeypatch) -> None:
    """They are given what their parent found, which may be kept nowhere."""
    monkeypatch.setattr(resolve, "layer_of", lambda *_: resolve.Found(5, "measured"))
    flags = ["--kv-policy", "fastkv:kv_rate=0.1", "--dtype", "float32", "--enforce-eager"]
    for count in (1, 2):
        args = parser.parse_args(["--model", llama, "--skip-tokenizer-init", *flags])
        engine_args = AsyncEngineArgs.from_cli_args(args)
        engine_args._api_process_count, engine_args._api_process_rank = count, -1
        assert engine_args.create_engine_config().additional_config["kv_measured"] == {
            "tsp_layer": 5
        }
        found = {"kv_policy": "fastkv:kv_rate=0.1", "kv_measured": {"tsp_layer": 5}}
        again = pickle.loads(pickle.dumps(args)).additional_config
        assert again == (found if count > 1 else {"kv_policy": "fastkv:kv_rate=0.1"})


def test_without_the_flag_nothing_is_set(parser, llama: str) -> None:
    assert parsed(parser, llama).additional_config == {}


@pytest.mark.parametrize(
    "name",
    [
        *("sped-4", "speed-0", "speed-4.5", "speed", ""),
        *("fier-31", "fier-64:group=128", "quest-64:page=12", "fier-64:reduction=mean"),
        "fastkv:kv_rate=1+streamingllm:recent=1020",
    ],
)
def test_a_bad_name_is_a_usage_error(parser, capsys, name: str) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-policy", name])
    error = capsys.readouterr().err
    assert "argument --kv-policy" in error
    assert "Traceback" not in error


def test_help_has_a_group_of_its_own(parser) -> None:
    text = parser.format_help()
    assert "KVPolicy" in text
    for keyword in ("KVPolicy", "kv-policy", "all"):
        parser._search_keyword = keyword
        try:
            text = parser.format_help()
        finally:
            parser._search_keyword = None
        assert "--kv-policy POLICY" in text, keyword
        assert "--kv-layout POLICY [POLICY ...]" in text or keyword == "kv-policy"


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"kv_policy": None},
        {"theirs": 1},
        {"kv_cache_reshape": 1},
        {"kv_port": 1, "kv_role": "both", "kv_connector": "c", "kv_transfer_params": {}},
        {"policy": 1, "layout": 1, "debug": 1, "cache_policy": 1, "kv_cache_policy": 1, 7: 1},
        {"k" * 100_000: 1, "kv_policy" * 50: 1},
        "not a dictionary",
    ],
)
def test_no_policy_is_set(config) -> None:
    assert not policy_is_set(config)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"kv_polcy": "speed-4"}, "'kv_polcy'.*'kv_policy'"),
        ({"kv-policy": "speed-4"}, "'kv-policy'.*'kv_policy'"),
        ({"kvpolicy": "speed-4"}, "'kvpolicy'.*'kv_policy'"),
        ({"KV_POLICY": "speed-4"}, "'KV_POLICY'.*'kv_policy'"),
        ({"kvPolicy": "speed-4"}, "'kvPolicy'.*'kv_policy'"),
        ({"kv policy": "speed-4"}, "'kv policy'.*'kv_policy'"),
        ({"kv.policy ": "speed-4"}, "'kv.policy '.*'kv_policy'"),
        ({"vk_policy": "speed-4"}, "'vk_policy'.*'kv_policy'"),
        ({"k_policy": "speed-4"}, "'k_policy'.*'kv_policy'"),
        ({"kv-layout": ["speed-4"]}, "'kv-layout'.*'kv_layout'"),
        ({"KVLayout": ["speed-4"]}, "'KVLayout'.*'kv_layout'"),
        ({"kv_policy": "speed-4", "kv-layout": ["speed-2"]}, "'kv-layout'.*'kv_layout'"),
        ({"kv_policy": "speed-4", "KV-Policy": "full"}, "'KV-Policy'.*'kv_policy'"),
        ({"kv_policy": "speed-4", "stash_tokens": 9}, "'stash_tokens'.*'kv_stash_tokens'"),
        ({"kv_policy": "speed-4", "tsp-layer": 9}, "'tsp-layer' is no key.*fastkv:tsp_layer=15"),
        (
            {"kv_policy": "fastkv:kv_rate=0.1", "kv_tsp_layer": 9},
            "'kv_tsp_layer'.*fastkv:tsp_layer=15",
        ),
        ({"kv_policy": "structkv:kv_rate=0.1", "kv_pivot": 9}, "'kv_pivot'.*structkv:pivot=15"),
        ({"kv_struct_reduction": "max"}, "'kv_struct_red.*structkv:struct_reduction=max"),
        ({"kv_policy": "speed-4", "KV-other": 1}, "'KV-other'.*kv_policy, kv_layout, kv_stash"),
        ({"kv_policies": ["speed-4"]}, "'kv_policies'.*'kv_policy'"),
        ({"kv_policy": "speed-4", "kv_other": 1}, "'kv_other'.*kv_policy, kv_layout, kv_stash"),
        ({"kv_policy": "speed-4", "kv_layouts": []}, "'kv_layouts'.*'kv_layout'"),
        ({"kv_layout": ["speed-4"]}, "kv_layout.*without kv_policy"),
        ({"kv_debug": True}, "kv_debug.*without kv_policy"),
        ({"kv_recall_every": 8}, "kv_recall_every.*without kv_policy"),
        ({"kv_request_policies": "off"}, "kv_request_policies.*without kv_policy"),
        (
            {"kv_policy": "full", "kv_requests_policies": "off"},
            "'kv_requests_policies'.*'kv_request_policies'",
        ),
    ],
)
def test_a_misspelled_key_is_an_error(make_config, config: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        policy_is_set(config)
    # A server looks closer only where a key is suspicious; these all are.
    with pytest.raises(ValueError, match=names):
        make_config(additional_config=config)


@pytest.mark.parametrize(
    "flags",
    [
        ["--additional-config.kv-policy", "speed-4"],
        ["--additional-config.kvpolicy", "speed-4"],
        ["--additional-config.KV_POLICY=speed-4"],
        ["--additional-config.kv-layout", '["speed-4"]'],
        ["--kv-policy", "speed-4", "--additional-config.kv-policy", "full"],
    ],
)
def test_a_misspelled_key_of_a_flag_is_an_error(parser, llama: str, flags: list[str]) -> None:
    with pytest.raises(ValueError, match=r"did you mean 'kv_(policy|layout)'"):
        parsed(parser, llama, *flags).create_engine_config()


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"kv_policy": "sped-4"}, "^kv_policy: .*sped-4"),
        ({"kv_policy": 4}, "^kv_policy: .*string"),
        ({"kv_policy": ["speed-4"]}, "^kv_policy: .*string"),
        ({"kv_policy": "speed-8"}, "^kv_policy: .*8 layers"),
        (
            {"kv_policy": "fastkv:kv_rate=1+streamingllm:recent=1020"},
            "^kv_policy: .*chosen by data",
        ),
        ({"kv_policy": "fier-64:group=96"}, "^kv_policy: .*group must be one of 32, 64, 128"),
        ({"kv_policy": "quest-9000"}, "^kv_policy: .*from 32 to 8192, got 9000"),
        (
            {"kv_policy": "fier-64", "kv_layout": ["speed-2+quest-64"]},
            "but fier-64 needs .* 1-bit keys.* and speed-2.quest-64 one of bounds of pages.*server",
        ),
        (
            {"kv_policy": "full", "kv_layout": ["fier-64", "fier-64:group=64"]},
            "sidecar, but fier-64 .*groups of 32.*fier-64:group=64 .*groups of 64.*method, group",
        ),
        (
            {"kv_policy": "quest-64", "kv_layout": ["quest-64:reduction=softmax"]},
            r"one sidecar, but quest-64 .*\(max,.*\(softmax,.*give them the same .* reduction",
        ),
        (
            {"kv_policy": "snapkv:kv_rate=0.1", "kv_share": "no"},
            'kv_share must be "on" or "off", got \'no\'',
        ),
        (
            {"kv_policy": "snapkv:kv_rate=0.1", "kv_eviction": "lirs"},
            'kv_eviction must be "adaptive" or "lru", got \'lirs\'',
        ),
        ({"kv_policy": "fier-64", "kv_recall_every": -1}, "kv_recall_every .*0 for never, got -1"),
        ({"kv_policy": "fier-64", "kv_recall_every": 1.5}, "kv_recall_every .*got 1.5"),
        ({"kv_policy": "fier-64", "kv_recall_every": True}, "kv_recall_every .*got True"),
        (
            {"kv_policy": "full", "kv_layout": ["speed-2"], "kv_recall_every": 8},
            "kv_recall_every has no effect: no policy of this server retrieves; remove it",
        ),
        ({"kv_policy": "full", "kv_layout": ["speed-2", "speed-x"]}, r"^kv_layout\[1\]: .*speed-x"),
        ({"kv_policy": "full", "kv_layout": ["speed-9"]}, r"^kv_layout\[0\]: .*8 layers"),
        ({"kv_policy": "full", "kv_layout": [3]}, r"^kv_layout\[0\]: .*string"),
        ({"kv_policy": "full", "kv_layout": "speed-2"}, "kv_layout must be a list"),
        ({"kv_policy": "full", "kv_debug": "yes"}, "kv_debug must be true or false"),
        (
            {"kv_policy": "full", "kv_request_policies": ["speed-4"]},
            r"kv_request_policies must be one of off, layout, list, got \['speed-4'\]; list lets",
        ),
    ],
)
def test_a_bad_value_is_an_error(config: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        KVSettings.of(config, num_layers=8)


def test_settings_of_a_config() -> None:
    settings = KVSettings.of(
        {"kv_policy": "speed-4", "kv_layout": ["speed-2", "full"], "kv_debug": True, "x": 1}, 8
    )
    assert settings.policy == parse_policy("speed-4")
    assert settings.layout.later_starts == (2, 4)
    assert (settings.num_layers, settings.debug, settings.stock) == (8, True, False)
    assert KVSettings.of({"kv_policy": "full"}, 8).stock
    assert KVSettings.of({"kv_policy": "full", "kv_layout": ["full"]}, 8).stock
    assert not KVSettings.of({"kv_policy": "full", "kv_layout": ["speed-2"]}, 8).stock


def test_settings_of_retrieval() -> None:
    config = {"kv_policy": "fier-64", "kv_layout": ["speed-2+fier-128"], "kv_recall_every": 8}
    settings = KVSettings.of(config, 8)
    assert settings.recall_every == 8 and not settings.stock
    assert settings.layout == Layout(
        (2,), RetrievalLayout("one_bit", 32, 1, "max", max_units=128), row_cuts=(2,)
    )
    assert KVSettings.of({"kv_policy": "fier-64"}, 8).recall_every == 0
    assert KVSettings.of({"kv_policy": "full", "kv_recall_every": 0}, 8).stock


def test_request_policy() -> None:
    settings = KVSettings.of({"kv_policy": "speed-4"}, 8)

    def of(extra_args) -> str:
        return str(request_policy(settings, SimpleNamespace(extra_args=extra_args)))

    assert of(None) == of({}) == of({"theirs": 1}) == of({"kv_policy": None}) == "speed-4"
    assert of({"kv_policy": "full"}) == "full"
    assert of({"kv_policy": "speed-4:tail=2"}) == "speed-4:tail=2"
    assert request_policy(settings, None) == settings.policy
    for nonsense in ("nonsense", ["speed-4"], {"a": 1}, 4):
        with pytest.raises(PolicyError):
            of({"kv_policy": nonsense})


@pytest.mark.parametrize(
    "config",
    [
        {"kv_policy": "fastkv"},
        {"kv_policy": "fier-64+snapkv"},
        {"kv_policy": "full", "kv_layout": ["speed-4", "structkv"]},
        {"kv_policy": "auto", "kv_layout": ["knorm"]},
    ],
)
def test_a_bare_name_is_refused_before_anything_is_measured(config: dict[str, object]) -> None:
    where = "kv_layout" if "kv_layout" in config else "kv_policy"
    with pytest.raises(ValueError, match=rf"^{where}.*does not say how much stays"):
        policy_is_set(config)

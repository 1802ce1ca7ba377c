"""Loads of `benchmarks.serving`, their figures, and what is measured again."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.nightly import nightly
from tokenizers import Tokenizer

from benchmarks.common import names
from benchmarks.common.word_tokenizer import write_tokenizer
from benchmarks.engine.shapes import SHAPES
from benchmarks.serving import load as serving
from benchmarks.serving.client import bench_flags
from benchmarks.serving.figures import (
    PRESETS,
    Gauges,
    Setting,
    figures,
    is_whole,
    pool_of_log,
    saturation_ratio,
)

ROOT = Path(__file__).resolve().parents[2]
LLAMA = SHAPES["llama-3.1-8b"]


@pytest.mark.parametrize("text", [text for texts in PRESETS.values() for text in texts])
def test_a_setting_is_what_its_name_says(text: str) -> None:
    setting = Setting.parse(text)
    assert str(setting) == text
    assert sum([setting.saturates, setting.rate is not None, setting.users is not None]) == 1


def test_a_setting_in_words() -> None:
    assert Setting.parse("9x8192/1024@inf") == Setting(9, 8192, 1024)
    assert Setting.parse("9x8192/1024@1.5") == Setting(9, 8192, 1024, rate=1.5)
    assert Setting.parse("9x8192/1024@c8") == Setting(9, 8192, 1024, users=8)
    loads = [Setting.parse(f"9x128000/256@{load}") for load in ("inf", "0.5", "c1", "c8")]
    assert [s.load for s in loads] == ["saturation", "0.5 requests/s", "1 user", "8 users"]
    assert {s.lengths for s in loads} == {"128K/256"}
    assert Setting.parse("1x32768/4096@inf").lengths == "32K/4K"


@pytest.mark.parametrize("text", ["8192/1024@inf", "0x1/1@inf", "1x1/1@0", "1x1/1@c0", "1x1/1@-1"])
def test_bad_settings(text: str) -> None:
    with pytest.raises(ValueError, match=r"write prompts|above 0"):
        Setting.parse(text)


def test_names_of_servers() -> None:
    assert names.split_name("stock") == (None, None)
    assert names.split_name("stock@fp8") == (None, "fp8")
    assert names.split_name("speed-24+fier-2048@fp8") == ("speed-24+fier-2048", "fp8")
    assert names.parts_of("speed-24+fier-2048@fp8") == ["speed-24", "fier-2048", "stock@fp8"]
    assert names.parts_of("snapkv") == names.parts_of("stock@fp8") == []
    asked = serving.asked_of("fier-64@fp8", ["speed-4", "snapkv"])
    assert asked == {"fier-64@fp8": None, "speed-4@fp8": "speed-4", "snapkv@fp8": "snapkv"}
    assert serving.asked_of("stock", ["speed-4"]) == {"stock": None}
    flags = serving.own_flags("fier-64", ["speed-4"])
    assert flags == ["--kv-policy", "fier-64", "--additional-config", '{"kv_layout": ["speed-4"]}']
    assert serving.own_flags("stock", ["speed-4"]) == []
    named = bench_flags(Setting(2, 8, 8), 0, "speed-4")
    assert json.loads(named[named.index("--extra-body") + 1]) == {
        "vllm_xargs": {"kv_policy": "speed-4"}
    }
    assert named[named.index("--num-warmups") + 1] == "1"
    later = bench_flags(Setting(2, 8, 8), 0, first=False)
    assert later[later.index("--num-warmups") + 1] == "0"
    for bad in ("@fp8", "stock@", ""):
        with pytest.raises(ValueError, match="write stock or a policy"):
            names.split_name(bad)


def test_figures_of_what_was_measured() -> None:
    bench = {"request_throughput": 2.0, "output_throughput": 64.0, "mean_tpot_ms": 4.0}
    bench |= {"p50_ttft_ms": 10.0, "p99_itl_ms": 30.0, "completed": 3}
    load = {"most_running": 3, "preemptions": 1}
    found = figures({"bench": bench, "server": load})
    assert found["user_tokens_per_s"] == 250.0 and found["requests_per_s"] == 2.0
    assert (found["p50_ttft"], found["p99_itl"], found["p99_ttft"]) == (10.0, 30.0, None)
    whole, short = {"bench": bench}, {"bench": bench | {"completed": 2}}
    setting = Setting(3, 8, 8)
    assert is_whole(whole, setting) and not is_whole(short, setting)
    assert not is_whole(whole | {"error": ["x"]}, setting)


def test_gauges_keep_the_most() -> None:
    gauges = Gauges()
    for running, preempted in ((3, 2.0), (5, 4.0), (1, 4.0)):
        gauges.read(
            "# HELP vllm:num_requests_running x\n"
            f'vllm:num_requests_running{{engine="0"}} {running}\n'
            f'vllm:num_requests_running{{engine="1"}} 1.0\n'
            'vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0\n'
            f'vllm:num_preemptions_total{{engine="0"}} {preempted}\n'
        )
    found = gauges.as_json()
    assert (found["most_running"], found["most_waiting"], found["preemptions"]) == (6, 0, 2)
    assert Gauges().as_json()["preemptions"] == 0


def test_pool_of_a_log() -> None:
    line = "GPU KV cache size: 917,776 tokens, Maximum concurrency for 131,072 tokens per request: "
    found = {"tokens": 917776, "of_tokens": 131072, "concurrency": 7.0}
    assert pool_of_log(f"x {line}7.00x\n") == found
    assert pool_of_log("nothing") == {}


def test_ideal_at_saturation() -> None:
    setting = Setting.parse("48x32768/4096@inf")

    def ratio(server: str, of: Setting = setting, gpu: str = "NVIDIA H200") -> float | None:
        return saturation_ratio(LLAMA, server, of, gpu, 917776, 256)

    assert ratio("stock") == 1
    speed, both = ratio("speed-16"), ratio("speed-16@fp8")
    assert speed is not None and both is not None and 1.8 < speed < both
    # Without an output it is prefill's ratio, with one prompt at a time decode's weights count.
    short = ratio("speed-16", Setting(48, 32768, 1))
    assert short == pytest.approx(32 / 15, rel=0.01)
    alone = ratio("speed-16", Setting(1, 32768, 4096))
    assert alone is not None and 1 < alone < speed
    # Where weights take less to read, the cache counts for more.
    narrow = saturation_ratio(LLAMA, "fier-2048", setting, "NVIDIA H200", 917776, 256, 1)
    wide = ratio("fier-2048")
    assert narrow is not None and wide is not None and narrow > wide
    for unknown in (
        ratio("fastkv"),
        ratio("stock@turboquant_4bit_nc"),
        ratio("speed-16", gpu="x"),
        ratio("speed-16", Setting(8, 32768, 4096, users=1)),
    ):
        assert unknown is None


def test_the_tokenizer_gives_back_its_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 512)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = [511, 0, 7, 7, 300]
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
    assert tokenizer.get_vocab_size() == 512


def test_only_what_is_missing_is_measured(tmp_path: Path) -> None:
    argv = ["--model", "tiny", "--servers", "stock", "--out", str(tmp_path / "out.json")]
    argv += ["--settings", "2x8/8@inf", "2x8/8@c1", "2x8/8@1"]
    args = serving.parse_args(argv)
    results = serving.Results(args, argv, SHAPES["tiny"], True)
    done: dict[str, Any] = {"bench": {"completed": 2}}
    results.add("stock", {"start_s": 1.0}, {"2x8/8@inf": done, "2x8/8@c1": {"error": ["x"]}})
    again = serving.Results(args, argv, SHAPES["tiny"], True)
    assert list(map(str, again.missing("stock", args.settings))) == ["2x8/8@c1", "2x8/8@1"]
    assert again.missing("speed-4", args.settings) == args.settings
    again.add("stock", {}, {"2x8/8@c1": done})
    content = json.loads((tmp_path / "out.json").read_text())
    runs = {key: value["run"] for key, value in content["servers"]["stock"]["settings"].items()}
    assert runs == {"2x8/8@inf": 0, "2x8/8@c1": 1} and len(content["runs"]) == 2
    # No folder of this machine is in it.
    assert str(tmp_path) not in json.dumps(content)
    other = serving.parse_args([*argv, "--max-num-seqs", "7"])
    with pytest.raises(SystemExit, match="another model or other settings"):
        serving.Results(other, argv, SHAPES["tiny"], True)


@pytest.mark.parametrize("args", ["", "--settings 8/8@inf", "--preset 8k --servers @fp8"])
def test_bad_serving_commands(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "tiny", "--out", "x.json", "--servers", "stock", *args.split()]
    with pytest.raises(SystemExit) as caught:
        serving.parse_args(argv)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


@nightly
def test_servers_under_load(tmp_path: Path) -> None:
    """The command as README has it: stock and a policy, by vLLM's own benchmark."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.serving", "--model", "tiny", "--out", str(out)]
    command += ["--servers", "stock", "speed-4", "--preset", "tiny", "--dtype", "float32"]
    command += ["--layout", "snapkv"]
    command += ["--max-num-batched-tokens", "96", "--max-num-seqs", "8"]
    command += ["--server-args", "--enforce-eager --block-size 32"]
    cpu = {"KVX_CPU": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | cpu, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    servers = json.loads(out.read_text())["servers"]
    assert servers["snapkv"]["asked_of"] == "speed-4"
    for name in ("stock", "speed-4", "snapkv"):
        for text in PRESETS["tiny"]:
            setting, found = Setting.parse(text), servers[name]["settings"][text]
            assert is_whole(found, setting)
            assert found["bench"]["total_input_tokens"] == setting.prompts * setting.input
            assert found["bench"]["total_output_tokens"] == setting.prompts * setting.output
            assert 1 <= found["server"]["most_running"] <= 8
    assert servers["speed-4"]["pool"]["pool_prompt_tokens"] > servers["stock"]["pool"]["tokens"]
    again = subprocess.run(command, cwd=ROOT, env=os.environ | cpu, capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout.count("measured before") == 2

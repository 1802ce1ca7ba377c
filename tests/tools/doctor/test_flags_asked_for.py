"""What doctor says of a server's flags."""

from pathlib import Path

import pytest
from support.findings import ON_CPU, lines

from vllm_kvx import plugin
from vllm_kvx.tools.doctor.findings import Context, Finding
from vllm_kvx.tools.doctor.sizes import size_of


def test_flags_that_are_refused_are_all_named(doctor) -> None:
    flags = ("--enable-prompt-embeds", "--pipeline-parallel-size", "2", *ON_CPU)
    (problem,) = doctor("speed-3", serve_args=flags)("model", "flags")
    assert problem.status == "problem"
    assert problem.says.startswith("KV policy speed-3 cannot run in this configuration:")
    assert "drop --enable-prompt-embeds" in problem.says
    assert "--pipeline-parallel-size 1" in problem.says
    # Neither is what `vllm-kvx serve` sets on a CPU.
    assert not problem.mend


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--no-such-flag",), "unrecognized arguments: --no-such-flag"),
        (("--max-model-len", "many"), "--max-model-len"),
        (("--max-model-len", "9999999"), "vLLM refuses: "),
    ],
)
def test_flags_that_vllm_refuses(doctor, flags: tuple[str, ...], says: str) -> None:
    (problem,) = doctor("speed-4", serve_args=(*flags, *ON_CPU))("model", "flags")
    assert problem.status == "problem" and says in problem.says, problem


def test_two_policies_are_refused_as_the_server_does(doctor) -> None:
    asked = doctor("speed-4", additional_config={"kv_policy": "speed-3"}, serve_args=ON_CPU)
    (problem,) = asked("model", "flags")
    assert problem.status == "problem" and "name different policies" in problem.says


def test_what_requests_may_name_is_told(doctor) -> None:
    asked = doctor("speed-4", request_policies="list", serve_args=ON_CPU)
    assert lines(asked("model", "flags"), "problem") == []
    assert "requests may name these policies alone: speed-4 (kv_request_policies)" in lines(
        asked("policy"), "ok"
    )
    asked = doctor("speed-4", additional_config={"kv_request_policies": "none"})
    (problem,) = asked("model", "policy")[1:]
    assert problem.status == "problem" and "must be one of off, layout, list" in problem.says


def test_further_policies_are_told(doctor) -> None:
    layout = ("speed-4", "fier-64")
    asked = doctor("full", layout=layout, request_policies="list")
    named = "requests may name these policies alone: full, speed-4, fier-64 (kv_request_policies)"
    assert named in lines(asked("model", "policy"), "ok")
    asked = doctor("full", layout=layout, serve_args=ON_CPU)
    assert lines(asked("model", "flags"), "problem") == []
    assert asked.context.additional_config == {"kv_policy": "full", "kv_layout": list(layout)}
    asked = doctor("full", layout=("speed-4",), additional_config={"kv_layout": ["speed-3"]})
    (problem,) = asked("model", "flags")
    assert problem.status == "problem" and "name different policies; drop one" in problem.says


def test_flags_in_a_config_file(doctor, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("kv-policy: speed-4\nkv-layout: [fier-64, speed-2]\n")
    asked = doctor(serve_args=("--config", str(file), *ON_CPU))
    assert lines(asked("model", "flags"), "problem") == []
    layout = {"kv_layout": ["fier-64", "speed-2"]}
    assert asked.context.additional_config == {"kv_policy": "speed-4", **layout}


def test_flags_without_a_policy(doctor) -> None:
    asked = doctor(serve_args=("--enable-prompt-embeds", *ON_CPU))
    taken, refused = asked("model", "flags")
    assert taken == Finding("ok", "vLLM takes these flags")
    assert refused.status == "note" and "drop --enable-prompt-embeds" in refused.says


def test_a_policy_that_nobody_reads(doctor, monkeypatch) -> None:
    monkeypatch.setattr(plugin, "is_loaded", lambda: False)
    asked = doctor(additional_config={"kv_policy": "speed-4"}, serve_args=ON_CPU)
    (problem,) = asked("model", "flags")
    assert problem.status == "problem" and "ignores kv_policy" in problem.says


@pytest.mark.parametrize(
    "refused", [("--enable-prompt-embeds",), ("--max-model-len", "9999999"), ("--no-such-flag",)]
)
@pytest.mark.parametrize("block", [("--block-size", "64"), ("--block-size=64",)])
def test_the_block_size_is_the_one_given_where_other_flags_are_refused(
    doctor, refused: tuple[str, ...], block: tuple[str, ...]
) -> None:
    """FIER's groups of 32 tokens do not divide vLLM's default, which would be taken otherwise."""
    asked = doctor("fier-64", prompt_len=1000, serve_args=(*block, *refused, *ON_CPU))
    assert lines(asked("model", "flags"), "problem")
    # Where the flags' check dies, another process goes on.
    for context in (asked.context, Context.of(asked.context.request, asked.context.state())):
        asked.context = context
        told = asked("policy")
        assert any(says.startswith("KV of such a prompt: ") for says in lines(told, "ok"))
        (note,) = [each for each in lines(told, "note") if "config.json" in each]
        assert "KV blocks of 64 tokens, as --block-size says, and 16-bit entries" in note
        assert "since the other flags were not read" in note


def test_a_block_size_in_a_config_file_is_read_where_a_policy_is_refused(
    doctor, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("block-size: 64\nenable-prompt-embeds: true\n")
    asked = doctor("fier-64", serve_args=("--config", str(file), *ON_CPU))
    assert lines(asked("model", "flags"), "problem")
    assert any("KV blocks of 64 tokens" in says for says in lines(asked("policy"), "note"))


@pytest.mark.parametrize(
    "block", [(), ("--block-size",), ("--block-size", "0"), ("--block-size", "x")]
)
def test_without_a_block_size_it_is_vllms_default(doctor, block: tuple[str, ...]) -> None:
    asked = doctor("speed-4", serve_args=("--no-such-flag", *ON_CPU, *block))
    assert lines(asked("model", "flags"), "problem")
    said = "KV blocks of 16 tokens and 16-bit entries, since the flags were not read"
    assert any(said in each for each in lines(asked("policy"), "note"))


SIZES = {
    "--max-model-len": "1k",
    "--max-num-batched-tokens": "96",
    "--gpu-memory-utilization": ".5",
}


def as_flags(sizes: dict[str, str], form: str) -> tuple[str, ...]:
    if form == "words":
        return tuple(word for flag in sizes.items() for word in flag)
    names = {flag: flag.replace("-", "_").replace("__", "--", 1) for flag in sizes}
    return tuple(f"{names[flag] if form == '_' else flag}={sizes[flag]}" for flag in sizes)


@pytest.mark.parametrize("refused", ["--enable-prompt-embeds", "--no-such-flag"])
@pytest.mark.parametrize("form", ["words", "=", "_"])
def test_lengths_and_memory_are_those_given_where_other_flags_are_refused(
    doctor, refused: str, form: str
) -> None:
    flags = (*as_flags(SIZES, form), refused, *ON_CPU)
    asked = doctor("structkv:pivot=3,kv_rate=0.4", gpu_memory=1.0, serve_args=flags)
    assert lines(asked("model", "flags"), "problem")
    for context in (asked.context, Context.of(asked.context.request, asked.context.state())):
        asked.context = context
        told = asked("policy")
        text = "\n".join(lines(told, "ok"))
        assert "a prompt of 1,000 tokens runs" in text and "(0.5 of 1.0 GiB, less" in text
        # The longest prompt and a step, in 16 bits.
        hidden = context.text_config["hidden_size"]
        assert f"{size_of((1000 + 96) * hidden * 2)} of stash" in text
        (note,) = [each for each in lines(told, "note") if "config.json" in each]
        assert "16 tokens and 16-bit entries, and by --max-model-len, --max-num-batched" in note
        assert "--gpu-memory-utilization, since the other flags were not read" in note


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        # Such as vLLM refuses, and one that it finds by itself.
        {"--max-model-len": "9999999", "--gpu-memory-utilization": "1.5"},
        {"--max-model-len": "1.5K", "--gpu-memory-utilization": "half"},
        {"--max-model-len": "auto", "--max-num-batched-tokens": "0"},
        {"--max-model-len": "9" * 400, "--block-size": "16k"},
    ],
)
@pytest.mark.parametrize("refused", ["--enable-prompt-embeds", "--no-such-flag"])
def test_without_lengths_and_memory_they_are_the_models_and_vllms(
    doctor, sizes: dict[str, str], refused: str
) -> None:
    flags = (*as_flags(sizes, "="), refused, *ON_CPU)
    asked = doctor("structkv:pivot=3,kv_rate=0.4", gpu_memory=1.0, serve_args=flags)
    assert lines(asked("model", "flags"), "problem")
    told = asked("policy")
    text, config = "\n".join(lines(told, "ok")), asked.context.text_config
    longest, hidden = config["max_position_embeddings"], config["hidden_size"]
    assert f"a prompt of {longest:,} tokens runs" in text and "(0.92 of 1.0 GiB, less" in text
    assert f"{size_of(2 * longest * hidden * 2)} of stash" in text
    assert any("16-bit entries, since the flags were not read" in n for n in lines(told, "note"))

"""What a server says of keys and flags that it does not know."""

import re
from pathlib import Path

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_kvx.config.settings import INTERNAL_KEYS, KEYS, PUBLIC_KEYS, policy_is_set

DOCUMENT = Path(__file__).parents[2] / "docs" / "use" / "configuration.md"


def test_the_listed_keys_are_those_that_users_set() -> None:
    section = DOCUMENT.read_text().split("## Keys of additional_config")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(kv_\w+)` \| ([^|]+) \|", section, re.MULTILINE)
    by_server = {key for key, default in rows if default == "set by the server"}
    assert set(INTERNAL_KEYS) == by_server
    assert set(PUBLIC_KEYS) == {key for key, _ in rows} - by_server
    assert set(KEYS) == {*PUBLIC_KEYS, *INTERNAL_KEYS}


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("kv_other", "; vllm-kvx"),
        ("kv_layouts", "; did you mean 'kv_layout'? vllm-kvx"),
        ("kv_measure", "; vllm-kvx"),
        ("kv-drafts", "; vllm-kvx"),
    ],
)
def test_an_unknown_key_is_told_of_these_alone(key: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"unknown key '{key}'") as error:
        policy_is_set({"kv_policy": "full", key: 1})
    assert str(error.value).endswith(
        f"'{key}' in additional_config{hint} knows {', '.join(PUBLIC_KEYS)}"
    )


@pytest.mark.parametrize("key", INTERNAL_KEYS)
def test_keys_that_a_server_sets_are_taken(key: str) -> None:
    assert policy_is_set({"kv_policy": "full", key: {}})


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """That of `vllm`, of which `serve` is a subcommand."""
    parser = FlexibleArgumentParser(prog="vllm")
    AsyncEngineArgs.add_cli_args(parser.add_subparsers().add_parser("serve"))
    return parser


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ("--kv-polcy full", "; did you mean --kv-policy?"),
        ("--kv-polcy=full", "; did you mean --kv-policy?"),
        ("--kvpolicy full", "; did you mean --kv-policy?"),
        ("--kv_policies full", "; did you mean --kv-policy?"),
        ("--kv-layuot speed-4 fier-64", "; did you mean --kv-layout?"),
        ("--other 1 --kv-layouts speed-4", "; did you mean --kv-layout?"),
        ("--kv-requests-policies off", "; did you mean --kv-request-policies?"),
        ("--kv-share off", "; did you mean --additional-config.kv_share?"),
        ("--kv-stash-token 9", "; did you mean --additional-config.kv_stash_tokens?"),
        ("--other kv_polcy", ""),
        ("--kv-cache-type fp8", ""),
        ("--kv-measured 1", ""),
    ],
)
def test_an_unknown_flag_is_told_of_ours(parser, capsys, flags: str, hint: str) -> None:
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["serve", "--kv-policy", "full", *flags.split()])
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("vllm: error: unrecognized arguments: --")
    assert said.partition(";")[2] == hint[1:]


def test_other_errors_are_vllms(parser, capsys) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["serve", "--max-num-seqs", "kv-polcy"])
    assert "did you mean" not in capsys.readouterr().err

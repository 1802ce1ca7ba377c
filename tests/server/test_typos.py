"""What a server says of keys and flags that it does not know."""

import re
from pathlib import Path

import pytest

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

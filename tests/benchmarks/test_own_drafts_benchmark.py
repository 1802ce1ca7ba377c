"""What the benchmark of a model's own drafts makes of vLLM's counts."""

from collections import Counter

from benchmarks.answers.own_drafts import row
from benchmarks.engine.own_drafts import agree, drafts_of, options_of


def test_shares_of_what_was_drafted() -> None:
    found = Counter({"drafts": 10, "draft_tokens": 30, "accepted_tokens": 12})
    found.update({"depth 0": 8, "depth 1": 4})
    assert row("fier-64", ("text", 1024), found, 3, 5, 6) == {
        "policy": "fier-64",
        "task": "text",
        "length": 1024,
        "steps": 10,
        "accepted": 0.4,
        "accepted_at_depth": [0.8, 0.4, 0.0],
        "tokens_a_step": 2.2,
        "same_answers": 5,
        "answers": 6,
    }
    assert row("fier-64", ("text", 1024), Counter(), 3, 6, 6)["tokens_a_step"] == 1


def test_a_servers_name_says_what_drafts() -> None:
    assert options_of("stock", False) == {"enforce_eager": False}
    assert options_of("snapkv", True)["additional_config"] == {"kv_policy": "snapkv:kv_rate=0.1"}
    own = options_of("full/fier-256x4", False)
    assert own["additional_config"] == {"kv_policy": "full"}
    assert own["speculative_config"] == {
        **{"method": "kvx", "policy": "fier-256"},
        **{"cache_to_weights": 0, "num_speculative_tokens": 4},
    }
    ngram = options_of("stock/ngramx3", False)
    assert "additional_config" not in ngram
    assert ngram["speculative_config"]["num_speculative_tokens"] == 3


def test_how_far_answers_agree() -> None:
    assert agree([1, 2, 3], [1, 2, 4]) == 2
    assert agree([1, 2], [1, 2, 3]) == 2 and agree([5], [6]) == 0


def test_how_many_tokens_a_server_drafts() -> None:
    names = ("stock", "fier-2048", "full/fier-256x4", "stock/ngramx3")
    assert [drafts_of(name) for name in names] == [0, 0, 4, 3]

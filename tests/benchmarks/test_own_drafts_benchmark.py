"""What the benchmark of a model's own drafts makes of vLLM's counts."""

from collections import Counter

from benchmarks.answers.own_drafts import row


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

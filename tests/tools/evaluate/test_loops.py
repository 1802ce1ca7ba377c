"""Answers that end in a loop, by texts whose tokens are counted by hand."""

import pytest

from vllm_kvx.tools.evaluate.loops import can_loop, has_loop, tokens_of

# Twenty words, no two alike.
PLAIN = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
WORDS = PLAIN.split()


def test_tokens_are_words_and_signs() -> None:
    assert tokens_of(" It's 3.5,\n\tsaid  she_x!") == [
        *("It", "'", "s", "3", ".", "5", ",", "said", "she_x", "!")
    ]
    assert tokens_of("你好 world") == ["你", "好", "world"] and tokens_of(" \n") == []


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("", False),
        (PLAIN, False),
        # Twelve tokens, and eleven.
        ("no " * 12, True),
        ("no " * 11, False),
        # A unit of four three times, and of six twice: twelve tokens both.
        ("a b c d " * 3, True),
        ("a b c d e f " * 2, False),
        # Three repeats of three have nine tokens; four have twelve.
        ("a b c " * 3, False),
        ("a b c " * 4, True),
        # The last repeat may be cut short, and does not count as one.
        ("a b c d e " * 3 + "a b c d", True),
        ("a b c d e f g " * 2 + "a b c d e f", False),
        # Other text may come before, and eight tokens after.
        (PLAIN + " and so on. " * 4, True),
        ("a b c d " * 3 + " ".join(WORDS[:8]), True),
        ("a b c d " * 3 + " ".join(WORDS[:9]), False),
        # What goes on after its loop is none.
        ("no " * 50 + PLAIN, False),
        # Units of twenty tokens, and of twenty-one.
        ((PLAIN + " ") * 3, True),
        ((PLAIN + " more ") * 3, False),
        # White space and how signs stand to words make no difference.
        ("so it is ,\nso it  is, so it is,", True),
        ("他说好。" * 3, True),
        # Of a longer text the last 256 tokens are looked at.
        (PLAIN * 100 + " no" * 12, True),
    ],
)
def test_what_is_a_loop(text: str, loops: bool) -> None:
    assert has_loop(text) == loops


def test_the_last_256_tokens_count() -> None:
    numbers = " ".join(map(str, range(1000)))
    assert has_loop(f"{numbers} " + "no " * 300)
    # Three repeats of twenty tokens, wherever else the text says the same.
    assert has_loop(f"{PLAIN} {numbers} " + f"{PLAIN} " * 3)
    assert not has_loop(f"{PLAIN} {numbers} " + f"{PLAIN} " * 2)


def test_what_is_too_short_to_loop() -> None:
    assert can_loop("no " * 12) and not can_loop("no " * 11)

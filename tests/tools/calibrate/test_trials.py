"""Which layers are tried, when a trial ends, and which layer holds and is confirmed."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.calibrate import by_answers, trials
from vllm_kvx.tools.calibrate.trials import (
    Asked,
    Candidate,
    Outcome,
    Trial,
    candidates,
    choose,
    is_hopeless,
    least_answers,
    try_out,
)
from vllm_kvx.tools.checkpoint.answers import Choice, Question, Seen

SUM, MAX = Choice(0.2, "sum"), Choice(0.2, "max")
MORE = Choice(0.4, "sum")


def by_layers(layer: int, rate: float) -> float:
    """The work of a model of four layers."""
    return (layer + 1 + (3 - layer) * rate) / 4


def found(scores: dict[Choice, list[float]], target: float) -> list[Any]:
    each = candidates(scores, by_layers, ("sum", "max"), target)
    return [(c.layer, c.choice.rate, c.choice.reduction) for c in each]


# Candidates.


def test_the_cheapest_comes_first_and_there_the_papers() -> None:
    scores = {SUM: [0.1, 0.98, 1.0, 0.5], MAX: [0.99, 0.99, 0.2, 1.0]}
    likely = [(0, "max"), (1, "sum"), (1, "max"), (2, "sum"), (3, "max")]
    later = [(2, "max"), (3, "sum")]
    assert found(scores, 0.98) == [(layer, 0.2, name) for layer, name in [*likely, *later]]


def test_layers_below_the_likely_ones_are_not_tried() -> None:
    """Above one of them others may hold."""
    one = candidates({SUM: [0.1, 0.9, 1.0, 0.5]}, by_layers, ("sum",), 0.99)
    assert [candidate.layer for candidate in one] == [2, 3]


def test_layers_that_slide_select_nothing() -> None:
    one = candidates({SUM: [1.0, 1.0, 1.0, 1.0]}, by_layers, ("sum",), 0.99, sliding=(0, 2))
    assert [candidate.layer for candidate in one] == [1, 3]


def test_rates_are_measured_by_their_own_best_and_ordered_by_work() -> None:
    """40% at layer 1 is less work than 20% at layer 2, and is tried before it."""
    scores = {SUM: [0.1, 0.5, 0.9, 0.2], MORE: [0.2, 1.0, 1.0, 1.0]}
    each = candidates(scores, by_layers, ("sum",), 0.98)
    assert [(c.layer, c.choice.rate) for c in each[:4]] == [(1, 0.4), (2, 0.2), (2, 0.4), (3, 0.4)]
    assert [candidate.cost for candidate in each[:2]] == pytest.approx([0.7, 0.8])
    # What is behind the likely ones.
    assert [(c.layer, c.choice.rate) for c in each[4:]] == [(3, 0.2)]


# Trials.


def test_the_least_answers_that_can_hold() -> None:
    """By hand, where all n stay: Wilson's lower end is n / (n + 1.96^2)."""
    for least in (0.5, 0.8, 0.9, 0.95):
        count = least_answers(least)
        assert count / (count + 1.959964**2) >= least > (count - 1) / (count - 1 + 1.959964**2)
    assert least_answers(0.8) == 16 and least_answers(0.9) == 35


def test_the_lower_end_decides() -> None:
    """One of 32 may be lost, two may not; 15 of 16 are the same share as 30 of 32, and do not."""
    candidate = Candidate(0, SUM, 1, 0.5)

    def held(kept: int, count: int, complete: bool = True) -> bool:
        pairs = ((1.0, 1.0),) * kept + ((0.0, 1.0),) * (count - kept)
        return Trial(candidate, pairs, complete).holds(0.8)

    assert held(32, 32) and held(31, 32) and not held(30, 32)
    assert held(16, 16) and not held(15, 16) and not held(15, 15)
    assert held(60, 64) and not held(32, 32, complete=False)
    assert not Trial(candidate, (), complete=True).holds(0.8)


def test_parts_of_answers_count_as_parts() -> None:
    """Of four values three stay; what the full model has half right can be half kept."""
    trial = Trial(Candidate(0, SUM, 1, 0.5), ((0.75, 1.0), (0.5, 0.5)), complete=True)
    assert (trial.kept, trial.asked) == (1.25, 1.5)
    assert trial.share.value == pytest.approx(1.25 / 1.5)
    assert trial.share.low < trial.share.value < trial.share.high


def test_when_a_trial_is_hopeless() -> None:
    lost, stays = (0.0, 1.0), (1.0, 1.0)
    assert not is_hopeless([lost], 31, 0.8) and is_hopeless([lost, lost], 30, 0.8)
    assert is_hopeless([lost], 15, 0.8) and not is_hopeless([stays], 15, 0.8)


def answered(right: float, *scores: float) -> Seen:
    return Seen({}, {SUM: list(scores or (1.0,))}, (1, 2), right)


def asked_of(right: Sequence[float], name: int = 0) -> Asked:
    questions = [Question((name, number)) for number in range(len(right))]
    return Asked(questions, [answered(each) for each in right])


def test_the_most_likely_lost_are_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a hopeless trial ends at its second prompt; wrong answers are not asked."""
    order: list[int] = []

    def kept(_: Any, question: Question, *__: Any) -> tuple[float, float]:
        order.append(question.token_ids[0])
        return (0.0, 1.0)

    monkeypatch.setattr(trials, "answers_kept", kept)
    seen = [answered(float(number != 5), 1.0, 1 - number / 40) for number in range(33)]
    kinds = ["other", "even"] + ["odd", "even"] * 16
    each = [Question((number,), kind=kinds[number]) for number in range(33)]
    asked = Asked(each, seen)
    counted: list[int] = []
    decoder: Any = None
    trial = try_out(decoder, asked, Candidate(1, SUM, 1, 0.5), 0.8, counted.append)
    assert order == [32, 31] and counted == [0, 1]
    assert (trial.kept, trial.asked, trial.complete) == (0, 2, False)
    assert trial.lost == {"odd": 1, "even": 1}
    monkeypatch.setattr(trials, "answers_kept", lambda *_: (1.0, 1.0))
    trial = try_out(decoder, asked, Candidate(1, SUM, 1, 0.5), 0.8, counted.append)
    assert (trial.kept, trial.asked, trial.complete, trial.lost) == (32, 32, True, {})


# The choice.


@pytest.fixture
def outcome() -> Callable[..., tuple[Outcome, list[tuple[int, int]]]]:
    """Chooses where each layer keeps so many of 32 answers that choose, and of 32 others.

    Returns the outcome, and what was tried: the layer, and 0 or 1 for the set of prompts.
    """

    def run(
        kept: dict[int, tuple[int, int]], right: tuple[int, int] = (32, 32), same: bool = False
    ) -> tuple[Outcome, list[tuple[int, int]]]:
        tried: list[tuple[int, int]] = []
        sets = [asked_of([1.0] * count + [0.0] * (32 - count), i) for i, count in enumerate(right)]

        def try_one(some: Asked, candidate: Candidate) -> Trial:
            number = sets.index(some)
            tried.append((candidate.layer, number))
            stay = kept[candidate.layer][number]
            pairs = [(1.0, 1.0)] * stay + [(0.0, 1.0)] * (right[number] - stay)
            return Trial(candidate, tuple(pairs), complete=True)

        each = [Candidate(layer, SUM, 1, layer / 10) for layer in kept]
        found = choose(sets[0], lambda: sets[0 if same else 1], each, 0.8, try_one)
        assert [attempt.trial.candidate.layer for attempt in found.attempts] == list(
            dict.fromkeys(layer for layer, _ in tried)
        )
        return found, tried

    return run


@pytest.mark.parametrize(
    ("kept", "chosen", "tried"),
    [
        ({1: (32, 32), 2: (32, 32)}, 1, [(1, 0), (1, 1)]),
        # 94% stay, and that more than 80% do is not sure.
        ({1: (30, 32), 2: (31, 31)}, 2, [(1, 0), (2, 0), (2, 1)]),
        # What was chosen by luck is not confirmed, and the next candidate is tried.
        ({1: (32, 29), 2: (32, 32)}, 2, [(1, 0), (1, 1), (2, 0), (2, 1)]),
        ({1: (32, 30), 2: (30, 32)}, None, [(1, 0), (1, 1), (2, 0)]),
    ],
)
def test_the_first_that_holds_twice(
    outcome: Any, kept: Any, chosen: int | None, tried: list[tuple[int, int]]
) -> None:
    found, order = outcome(kept)
    assert order == tried
    assert (None if found.chosen is None else found.chosen.trial.candidate.layer) == chosen
    if found.chosen is not None:
        assert found.chosen.last is found.chosen.confirmation


def test_prompts_that_are_both_are_asked_once(outcome: Any) -> None:
    found, tried = outcome({1: (30, 0), 2: (31, 0)}, same=True)
    assert tried == [(1, 0), (2, 0)] and found.chosen.trial.candidate.layer == 2
    assert found.chosen.confirmation is found.chosen.trial


def test_too_few_answers_say_nothing(outcome: Any) -> None:
    found, tried = outcome({1: (15, 32)}, right=(15, 32))
    assert found == Outcome() and not tried
    # The others may be too few, too: no candidate is confirmed by them.
    found, tried = outcome({1: (32, 15), 2: (32, 15)}, right=(32, 15))
    assert found.chosen is None and tried == [(1, 0)] and found.confirmed_by.right == 15


# A user's prompts, and what a layer costs.


def test_own_prompts_choose_or_confirm() -> None:
    def split(count: int) -> list[list[int]]:
        prompts = [[number] for number in range(count)]
        sets = (by_answers.own_prompts(prompts, confirms) for confirms in (False, True))
        return [[question.token_ids[0] for question in each] for each in sets]

    assert split(63) == [list(range(63))] * 2
    assert split(64) == [list(range(0, 64, 2)), list(range(1, 64, 2))]
    with pytest.raises(ToolError, match=r"31 prompts: .* by decoding at least 32: give"):
        split(31)


def test_the_cost_is_the_work_of_rows() -> None:
    from vllm_kvx.policy.methods.fastkv import FastKV
    from vllm_kvx.policy.methods.structkv import StructKV

    config = {
        **{"model_type": "llama", "num_hidden_layers": 28, "hidden_size": 1536},
        **{"num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960},
        **{"vocab_size": 151936, "max_position_embeddings": 32768},
    }
    for policy in (FastKV(), StructKV()):
        cost = by_answers.cost_of(policy, config, 2048)
        # Layer 16 itself runs the chosen rows alone: 16 layers in full, 12 with a fifth.
        assert cost(16, 0.2) == pytest.approx((16 + 12 * 0.2) / 28, abs=0.02)
        assert cost(11, 0.4) < cost(16, 0.2) < cost(13, 0.4) < cost(26, 0.2) < 1

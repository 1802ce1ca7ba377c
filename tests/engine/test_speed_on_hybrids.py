"""SPEED on models some of whose layers slide over a window, against the dense reference.

Above the cut layers with full attention hold anchors, tail and generated tokens; those that slide
hold no anchors. Prompts are shorter and longer than the window and than a chunk.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from reference import hybrids
from support.cpu_hybrids import complete_cpu_hybrids
from support.engine import running
from support.expected import Policy, Speed
from support.nightly import by_day
from support.parity import ask, assert_parity, assert_parity_preempted, in_turn, room_for
from support.prompts import prompts_of

# By model, a cut with layers of both kinds on either side.
CUTS = {
    "gemma3_text": 5,
    "gemma2": 3,
    "gemma4_text": 5,
    "gpt_oss": 4,
    "cohere2": 4,
    "exaone4": 6,
}
# By prompt of `test_parity`, the policy under which it comes again, longer by three tokens. Its
# anchors are there if the policy before had them, or computed the layers above, too.
READERS = {0: 2, 1: 6, 2: 2, 3: 2, 4: 0, 5: 2, 10: 2, 11: 0, 12: 2}
names = list(CUTS)
every = by_day(names, {names.index("gemma3_text")})


def policies_of(cut: int) -> list[Policy]:
    """Of one server; anchors and tails are shorter and longer than a block and than a window."""
    return [
        Speed(cut),
        Speed(),
        Speed(cut, anchors=0),
        Speed(cut, anchors=40, tail=5),
        Speed(cut, tail=70),
        Speed(cut, anchors=70),
        Speed(cut + 1, anchors=3),
    ]


@pytest.fixture(autouse=True)
def as_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    complete_cpu_hybrids(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    models: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in models:
            models[name] = hybrids.build(tmp_path_factory.mktemp(name), name)
        return models[name]

    return of


@pytest.mark.parametrize("name", every)
def test_parity(made: Callable[[str], Path], name: str) -> None:
    """In chunks beside each other; answers longer than the window; over each other's prefixes.

    Then a prompt's tail begins where a cached prefix of it ends, or behind it: within a window,
    at a block's end, and with a single token.
    """
    model, policies = made(name), policies_of(CUTS[name])
    lengths = (97, 200, 33, 161, 130, 250, 1, 2, 5, 41, 64, 96, 193)
    prompts = prompts_of(lengths)
    each = in_turn(policies, len(lengths))
    with running(
        model,
        "full",
        config=room_for(policies),
        enable_prefix_caching=True,
        max_model_len=512,
        max_num_seqs=16,
    ) as engine:
        answers = ask(engine, prompts, each, max_tokens=6)
        long = ask(engine, prompts[:6], each[:6], max_tokens=90)
        readers = [policies[who] for who in READERS.values()]
        longer = [[*prompts[i], *prompts[i][:3]] for i in READERS]
        again = ask(engine, longer, readers, max_tokens=4)
        engine.assert_idle()
    assert [answer.cached for answer in long] == [96, 192, 32, 0, 32, 0]
    assert [answer.cached for answer in again] == [96, 192, 32, 160, 128, 224, 64, 96, 192]
    assert_parity(model, [*answers, *long, *again], [*each, *each[:6], *readers])


@pytest.mark.parametrize("name", by_day(names, ()))
def test_preempted(made: Callable[[str], Path], name: str) -> None:
    options = {"num_gpu_blocks_override": 76, "max_model_len": 288, "max_num_seqs": 9}
    options["enable_prefix_caching"] = True  # Of what it had computed some is there still.
    assert_parity_preempted(made(name), policies_of(CUTS[name]), **options)

"""Token selection on models some of whose layers slide over a window, against the references.

Above the layer that selects, layers that slide see the chosen tokens by their positions; the last
ones of a prompt, as many as a window reaches, always go on.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from reference import hybrids
from reference.after import After
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.gemfilter import Filter
from reference.structkv import Struct
from support import inside
from support.cpu_hybrids import complete_cpu_hybrids
from support.engine import BLOCK, running
from support.expected import Policy, Speed
from support.nightly import by_day
from support.parity import (
    ask,
    assert_parity,
    assert_parity_and_again,
    assert_parity_preempted,
    in_turn,
    room_for,
)
from support.prompts import prompts_of

# By model, two layers with full attention, and layers of both kinds on either side of the first.
SELECTS = {
    "gemma3_text": (3, 7),
    "gemma2": (3, 5),
    "gemma4_text": (3, 7),
    "gpt_oss": (3, 5),
    "cohere2": (3, 7),
    "exaone4": (3, 7),
}
# By prompt of `test_parity`, the policy under which it comes again, longer by three tokens, and the
# last tokens that this one computes itself; None if all.
READERS = {
    0: (4, 8),
    1: (5, 4),
    2: (0, None),  # What runs again from layer 0 on leaves nothing.
    3: (10, 1),
    4: (0, 8),
    5: (10, None),  # Its anchors ran no layer above.
    6: (10, 1),
    7: (7, 8),
    8: (3, None),
    9: (9, 8),
    14: (6, 8),
}
names = list(SELECTS)
every = by_day(names, {names.index("gemma3_text")})


def policies_of(layers: tuple[int, int]) -> list[Policy]:
    """Of one server."""
    low, high = layers
    return [
        Keep(tsp_layer=low, tsp_rate=0.2, kv_rate=0.3),
        Struct(low, kv_rate=0.3),
        Filter(low, rate=0.2),
        Keep(),
        Keep(tsp_layer=low, tsp_rate=0.3, kv_rate=1.0, tsp_reduction="max"),
        Struct(low, struct_rate=0.1, kv_rate=0.2, heads="own", window=4),
        Keep(kv_rate=0.2),
        Critical(tsp_layer=low, tsp_rate=0.3, kv_rate=0.3),
        Filter(low, rate=0.05, window=8),
        Keep(tsp_layer=high, tsp_rate=0.1, kv_rate=0.1),
        Speed(low + 1, anchors=3),
    ]


def waiting_policies_of(layers: tuple[int, int]) -> list[Policy]:
    """Of another: retention waits for generated tokens."""
    low, high = layers
    return [
        After(Keep(tsp_layer=low, tsp_rate=0.2, kv_rate=0.2), 3),
        After(Keep(kv_rate=0.2), 2, propagates=Struct(high, kv_rate=1)),
        After(Struct(low, struct_rate=0.3, kv_rate=0.2), 5),
        After(Critical(kv_rate=0.2), 4, propagates=Keep(tsp_layer=low, tsp_rate=0.2)),
        # Above the cut all that goes on stays, beside the last tokens.
        After(Keep(tsp_layer=high, tsp_rate=0.1, kv_rate=0.6), 8),
        Keep(tsp_layer=low, tsp_rate=0.2, kv_rate=0.2),
        Keep(),
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
    """In chunks beside each other; answers longer than the window; over each other's prefixes."""
    model, policies = made(name), policies_of(SELECTS[name])
    lengths = (197, 250, 233, 161, 330, 290, 199, 193, 201, 225, 1, 2, 5, 64, 96)
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
        long = ask(engine, prompts[:3], each[:3], max_tokens=70)
        grain, readers = inside.state_tokens(engine), [policies[who] for who, _ in READERS.values()]
        longer = [[*prompts[i], *prompts[i][:3]] for i in READERS]
        again = ask(engine, longer, readers, max_tokens=4)
        engine.assert_idle()
    assert [answer.cached for answer in long] == [189 // grain * grain, 242 // grain * grain, 0]
    for answer, policy, (who, own) in zip(again, readers, READERS.values(), strict=True):
        size = BLOCK if who in (3, 6, 10) else grain
        limit = 0 if own is None else (len(answer.prompt) - own) // size * size
        assert answer.cached == limit, policy
    assert_parity(model, [*answers, *long, *again], [*each, *each[:3], *readers])


@pytest.mark.parametrize("name", every)
def test_parity_after_generated_tokens(made: Callable[[str], Path], name: str) -> None:
    """Answers end before retention has what it waits for, and behind the window."""
    lengths = (197, 250, 233, 161, 330, 290, 199, 193, 201, 225, 1, 2, 5, 64, 96, 128, 129)
    assert_parity_and_again(made(name), lengths, waiting_policies_of(SELECTS[name]), (70, 4))


# A pool that a server starts with holds all of these prompts of Cohere 2.
@pytest.mark.parametrize("name", by_day([name for name in names if name != "cohere2"], ()))
def test_preempted(made: Callable[[str], Path], name: str) -> None:
    options = {"num_gpu_blocks_override": 76, "max_model_len": 288, "max_num_seqs": 9}
    options["enable_prefix_caching"] = True  # Of what it had computed some is there still.
    assert_parity_preempted(made(name), policies_of(SELECTS[name]), **options)
    waits = waiting_policies_of(SELECTS[name])
    assert_parity_preempted(made(name), [waits[0], Keep(), waits[2], Keep()], **options)

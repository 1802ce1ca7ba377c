"""Prompts that a KV connector stores and loads, on vLLM's own engine with its example connector.

That keeps each prompt's blocks on disk, copied by the shape of keys and values.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reference.fier import Retrieve
from support.engine import BLOCK, Engine, keep_in_process, running
from support.expected import FULL, Policy, Read, named
from support.nightly import by_day
from support.parity import ask, assert_close, assert_parity, room_for
from support.prompts import prompts_of

# More than a group's, some of which is written by decode steps.
TOKENS = 34
FIER = Read(Retrieve(64, dense_below=0))
# Not one above a multiple of a block's, of which the connector does not find what it stored.
LENGTHS = (200, 70, 170, 300)


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny()


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Without prefixes of its own. The connector takes prompts of one chunk alone."""
    store = {"shared_storage_path": str(tmp_path_factory.mktemp("store"))}
    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_in_process(monkeypatch)
        with running(
            model,
            "full",
            config=room_for([FULL, FIER]),
            max_num_batched_tokens=1024,
            max_model_len=512,
            kv_transfer_config={
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": store,
            },
        ) as engine:
            yield engine


@pytest.mark.parametrize(
    ("before", "after"), by_day([(FULL, FIER), (FIER, FULL), (FIER, FIER)], {0})
)
def test_what_one_stores_another_loads(
    engine: Engine, model: Path, before: Policy, after: Policy
) -> None:
    """Codes of keys that were loaded are made here: they lie in a page's tail."""
    prompts = prompts_of(LENGTHS, seed=len(named(before)) + 2 * len(named(after)))
    cold = ask(engine, prompts, [before] * len(prompts), max_tokens=TOKENS)
    assert not any(answer.cached for answer in cold)
    # Free blocks hold neither their entries nor their codes any more.
    others = prompts_of(LENGTHS, seed=99)
    ask(engine, others, [FULL] * len(others), max_tokens=1)
    loaded = ask(engine, prompts, [after] * len(prompts), max_tokens=TOKENS)
    lens = [(len(prompt) - 2) // BLOCK * BLOCK for prompt in prompts]
    assert [answer.cached for answer in loaded] == lens
    assert_parity(model, [*cold, *loaded], [before] * len(cold) + [after] * len(loaded))
    if before == after:
        assert_close(loaded, cold)
    engine.assert_idle()


def test_one_that_comes_back_loads_nothing(engine: Engine, model: Path) -> None:
    """What decode steps under retrieval have left is no prompt's."""
    prompts = prompts_of(LENGTHS, seed=7)
    undisturbed = ask(engine, prompts, [FIER] * len(prompts), max_tokens=12)
    ids = engine.submit(prompts, 12, [named(FIER)] * len(prompts), [None] * len(prompts))
    engine.step(5)
    engine.throw_out()
    engine.finish()
    assert [engine.answered[i] for i in ids] == [answer.tokens for answer in undisturbed]
    assert_parity(model, undisturbed, FIER)
    engine.assert_idle()

"""An engine under load: mixed policies and turns, a pool that preempts constantly, random aborts.

Each request runs alone first, on an engine with room. Then all run on one whose pool holds a few of
them, and every answer must be the one it had alone. The kernels' torch references score and select
(``inside.use_dense_ops``); ``test_soak_server`` runs the kernels.
"""

import ctypes
import gc
import random
import time
from pathlib import Path

import pytest
import torch
from support import inside, options
from support.engine import Engine, greedy, keep_in_process, running
from support.models import LOOKUP

from soak import report
from soak.announced import Announced
from soak.memory import Series
from soak.plan import (
    KV_GROUPS,
    MAX_LEN,
    ROOM,
    SERVER_POLICY,
    Comparison,
    Turn,
    adapters_of,
    conversations,
    with_adapters,
    with_drafts,
    with_events,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU's load")

SEED = 0
# Of KV groups together; a request of the greatest length needs 20 in each.
BLOCKS = 24 if KV_GROUPS == 1 else 60
IN_FLIGHT = 24
OPTIONS = dict(
    config={"kv_layout": list(ROOM)},
    max_model_len=MAX_LEN,
    max_num_batched_tokens=192,
    disable_log_stats=True,
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_in_process(monkeypatch)
    torch.set_num_threads(1)
    inside.use_dense_ops(monkeypatch)


def run_alone(talks: list[list[Turn]], adapters: list[Path]) -> None:
    """Fills in prompts and answers: one request at a time, nothing shared, room for all."""
    from vllm.inputs import TokensPrompt

    alone = OPTIONS | with_adapters()
    with running(LOOKUP, SERVER_POLICY, max_num_seqs=1, **alone) as engine:
        for depth in range(max(map(len, talks))):
            turns = []
            for talk in talks:
                if depth < len(talk):
                    before = talk[depth - 1] if depth else None
                    said = before.prompt + before.answer if before else []
                    talk[depth].prompt = said + talk[depth].adds
                    turns.append(talk[depth])
            outputs = engine.llm.generate(
                [TokensPrompt(prompt_token_ids=turn.prompt) for turn in turns],
                [greedy(turn.max_tokens, turn.policy, logprobs=2) for turn in turns],
                use_tqdm=False,
                lora_request=[
                    engine.lora_request(None if turn.adapter is None else adapters[turn.adapter])
                    for turn in turns
                ],
            )
            for turn, output in zip(turns, outputs, strict=True):
                (choice,) = output.outputs
                turn.answer = list(choice.token_ids)
                for entry in choice.logprobs:
                    best, second = sorted((each.logprob for each in entry.values()), reverse=True)[
                        :2
                    ]
                    turn.gaps.append(best - second)
        engine.assert_idle()


def give_back() -> None:
    """Frees what this process does not use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def test_answers_are_those_of_requests_alone(tmp_path: Path) -> None:
    count = options.requests()
    talks, adapters = conversations(count, SEED), adapters_of(tmp_path)
    run_alone(talks, adapters)
    began = time.monotonic()
    with running(
        LOOKUP,
        SERVER_POLICY,
        max_num_seqs=16,
        enable_prefix_caching=True,
        scheduler_reserve_full_isl=False,  # Prompts begin that the pool cannot hold to their end.
        num_gpu_blocks_override=BLOCKS,
        **(OPTIONS | with_adapters() | with_drafts() | with_events()),
    ) as engine:
        announced = Announced(engine) if options.soak_events() else None
        memory = Series(count, ["self"], give_back)
        done, aborted = under_load(engine, talks, adapters, memory)
        preempted, stats = engine.preemptions(), engine.stats()
        blocks = engine.pool.num_gpu_blocks
        if announced is not None:
            announced.assert_cached()
    compared = Comparison()
    for turn, tokens in done:
        compared.add(turn, tokens)
    counters = stats["policies"].values()
    hits = sum(each["prefix_hit"] for each in counters)
    report.add(
        "engine",
        requests=count,
        policies=len({turn.policy for talk in talks for turn in talk}),
        adapters=len(adapters),
        drafted=sum(each["tokens_drafted"] for each in counters),
        accepted=sum(each["tokens_accepted"] for each in counters),
        pool_blocks=blocks,
        aborts=aborted,
        preemptions=preempted,
        prefix_hit_tokens=hits,
        equal=compared.equal,
        near_ties=compared.near_ties,
        mismatches=len(compared.mismatches),
        announced=0 if announced is None else announced.stored,
        leaked_blocks=sum(each["blocks_held"] for each in counters),
        **memory.figures(),
        seconds=round(time.monotonic() - began),
    )
    assert not compared.mismatches, "\n".join(compared.mismatches)
    assert compared.near_ties <= max(count // 50, 1)
    assert compared.equal + compared.near_ties + aborted == count
    assert aborted and preempted >= count // 20, (aborted, preempted)
    assert hits, "no request found the prefix of another"
    memory.assert_still()


def under_load(
    engine: Engine, talks: list[list[Turn]], adapters: list[Path], memory: Series
) -> tuple[list[tuple[Turn, list[int]]], int]:
    """Runs all; the answers, and how many requests were aborted."""
    rng = random.Random(SEED)
    waiting = [list(talk) for talk in talks]
    rng.shuffle(waiting)
    open_talks: dict[str, tuple[Turn, list[Turn], int]] = {}
    done: list[tuple[Turn, list[int]]] = []
    aborted = steps = 0
    while waiting or open_talks:
        while waiting and len(open_talks) < IN_FLIGHT and rng.random() < 0.6:
            talk = waiting.pop()
            turn, *rest = talk
            adapter = None if turn.adapter is None else adapters[turn.adapter]
            (name,) = engine.submit([turn.prompt], turn.max_tokens, [turn.policy], [adapter])
            open_talks[name] = (turn, rest, steps)
        if open_talks:
            engine.step()
        steps += 1
        for name, (turn, rest, since) in list(open_talks.items()):
            tokens = engine.answered.pop(name, None)
            if tokens is not None:
                done.append((turn, tokens))
            elif turn.abort_after is not None and steps - since > turn.abort_after:
                engine.llm.llm_engine.abort_request([name])
                aborted += 1
            else:
                continue
            del open_talks[name]
            if rest:  # The next turn, at once or soon.
                waiting.insert(len(waiting) - rng.randint(0, min(len(waiting), 3)), rest)
            memory.after(len(done) + aborted)
        if not open_talks and rng.random() < 0.2:
            engine.assert_idle()
    engine.assert_idle()
    return done, aborted

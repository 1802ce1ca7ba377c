"""How many generated tokens of requests that resume run in a step."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from vllm_kvx.cache.resumed_rows import ResumedRows
from vllm_kvx.policy.retrieval_layers import RetrievalLayers
from vllm_kvx.policy.spec import parse_policy

READS = parse_policy("fier-64:reuse_layers=2")


def rows_of(reuse_layers: int = 2, drafts: int = 0, is_hybrid: bool = False) -> ResumedRows:
    """Of a server of at most five requests."""
    settings: Any = SimpleNamespace(
        layout=SimpleNamespace(retrieving=RetrievalLayers(reuse=reuse_layers))
    )
    config: Any = SimpleNamespace(
        num_speculative_tokens=drafts,
        scheduler_config=SimpleNamespace(max_num_seqs=5),
        model_config=SimpleNamespace(is_hybrid=is_hybrid),
    )
    return ResumedRows(settings, config)


def request_of(name: str, prompt: int = 100, generated: int = 40, runs: bool = False) -> Any:
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=prompt,
        num_output_tokens=generated,
        num_tokens=prompt + generated,
        num_computed_tokens=0,
        status=RequestStatus.RUNNING if runs else RequestStatus.PREEMPTED,
    )


@pytest.mark.parametrize("drafts", [0, 3])
def test_what_shares_of_others_leave(drafts: int) -> None:
    rows, share = rows_of(drafts=drafts), 1 + drafts
    first, second = request_of("a"), request_of("b")
    for request in (first, second):
        rows.restart(request, READS)
    others: list[Any] = [None] * 2
    # The prompt, which reads everything, and the shares of three that do not run.
    assert rows.clip(first, 64, 76, others) == 36 + 3 * share
    # One of these is taken as another resumes in the same step; its prompt comes in all the same.
    assert rows.clip(second, 0, 140, [*others, first]) == 100
    assert rows.clip(second, 100, 40, [*others, first]) == 0
    # One that runs has its own share at least, and what ends within its prompt is not clipped.
    rows.new_step()
    first.status = RequestStatus.RUNNING
    assert rows.clip(first, 103, 37, [first, *[None] * 4]) == share
    assert rows.clip(second, 0, 64, [first, *[None] * 3]) == 64


def test_until_it_has_a_further_token() -> None:
    rows, request = rows_of(), request_of("a")
    assert not rows
    rows.restart(request, READS)
    request.num_tokens += 1  # Of a step that was under way.
    rows.new_step()
    # A connector loads all of it, which fails.
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, 140
    rows.new_step()
    request.num_computed_tokens = 96
    rows.new_step()
    assert rows and rows.clip(request, 96, 45, [request]) == 4 + 5
    request.num_computed_tokens = 141
    rows.new_step()
    assert rows
    request.num_tokens += 1
    rows.new_step()
    assert not rows and rows.clip(request, 100, 40, []) == 40


def test_where_nothing_is_clipped() -> None:
    for rows in (rows_of(reuse_layers=1), rows_of(is_hybrid=True)):
        rows.restart(request_of("a"), READS)
        assert not rows
    rows = rows_of()
    rows.restart(request_of("a"), parse_policy("full"))
    rows.restart(request_of("b", generated=0), READS)
    assert not rows
    rows.restart(request_of("c"), READS)
    rows.remove_request("c")
    assert not rows

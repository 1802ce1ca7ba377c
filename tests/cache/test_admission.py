"""Where chunks end and which prompts wait, without an engine."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from support import inside
from vllm import SamplingParams

from vllm_kvx.cache.admission import SPLIT_WINDOWS, PromptAdmission
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import STASH_PAGE, Gap, Storage, stash_pages, storage_of

FASTKV = "fastkv:kv_floor=0,tsp_layer=3"


def admission(stash_tokens: int = 1024, **config: Any) -> PromptAdmission:
    settings = KVSettings.of(
        {"kv_policy": FASTKV, "kv_layout": ["snapkv:kv_floor=0"]}, num_layers=8
    )
    defaults = {"max_num_batched_tokens": 96, "max_num_seqs": 16, "long_prefill_token_threshold": 0}
    made = KVSettings(**{**vars(settings), "stash_tokens": stash_tokens})
    return PromptAdmission(made, SimpleNamespace(**(defaults | config)))  # type: ignore[arg-type]


def add(to: PromptAdmission, name: str, length: int, policy: str = FASTKV) -> Any:
    request = SimpleNamespace(
        request_id=name,
        num_prompt_tokens=length,
        num_tokens=length,
        num_computed_tokens=0,
        num_output_placeholders=0,
    )
    settings = KVSettings.of({"kv_policy": policy}, num_layers=8)
    to.add_request(request, settings.policy, stored(settings.policy, length))
    return request


def stored(policy: KVPolicy, length: int) -> list[Storage]:
    """What such a request stores, by stage."""
    return [storage_of(policy, length, start, 4, 8) for start in (0, 4)]


@pytest.mark.parametrize(
    ("start", "tokens", "expected"),
    [
        (0, 96, 96),
        (192, 96, 8),  # Up to the end of the prompt and no further, a resumed request's too.
        (96, 96, 96),  # Ends where the window begins.
        (150, 45, 42),  # Would end within the window, so before it.
        (192, 3, 3),  # Cannot: the window is spread over chunks.
        (200, 30, 30),  # Generated tokens.
    ],
)
def test_chunks(start: int, tokens: int, expected: int) -> None:
    one = admission()
    assert one.clip(add(one, "a", 200), start, tokens) == expected


def test_a_window_waits_for_the_tokens_that_are_drafted_behind_it() -> None:
    """Its queries are kept until these have run, and there is room for those of so many."""
    one, name = admission(), "snapkv:kv_floor=0,lookahead=4"
    each = [add(one, str(number), 100, name) for number in range(SPLIT_WINDOWS + 1)]
    for request in each[:-1]:
        assert one.clip(request, 0, 100) == 100
    assert one.clip(each[-1], 0, 100) == 92
    assert one.clip(each[-1], 92, 8) == 0
    one.release("0")
    assert one.clip(each[-1], 92, 8) == 8
    # All of it stays, so that nothing is drafted.
    assert one.clip(add(one, "short", 8, name), 0, 8) == 8


def test_the_window_is_a_chunk_of_its_own_beside_several_passes() -> None:
    one = admission()
    request = add(one, "a", 600, "fastkv:kv_floor=0,tsp_layer=3,tsp_rate=0.5")
    assert one.clip(request, 576, 24) == 16
    assert one.clip(request, 592, 8) == 8


@pytest.mark.parametrize(
    ("start", "tokens", "expected"),
    [(0, 96, 96), (144, 96, 51), (195, 96, 5), (195, 3, 3), (200, 30, 30)],
)
def test_a_chunk_ends_where_entries_take_the_slots_of_others(
    start: int, tokens: int, expected: int
) -> None:
    one = admission()
    request = SimpleNamespace(
        request_id="a",
        num_prompt_tokens=200,
        num_tokens=200,
        num_computed_tokens=0,
        num_output_placeholders=0,
    )
    policy = KVSettings.of({"kv_policy": "speed-4:tail=5"}, num_layers=8).policy
    turns = Storage(200, Gap(1, 194), 5, Gap(0, 195), 195)
    one.add_request(request, policy, [Storage(200, rows=200), turns])  # type: ignore[arg-type]
    assert one.clip(request, start, tokens) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("start", "tokens", "expected"),
    [
        (96, 96, 96),  # Ends where the window begins.
        (150, 45, 42),
        (192, 30, 8),  # Tokens are chosen there, and the window is kept for retention.
        (195, 3, 3),
        (200, 30, 4),  # A resumed request's: the others go by what these attend to, too.
        (202, 1, 1),
        (204, 30, 30),
    ],
)
def test_a_chunk_ends_where_tokens_are_chosen_and_where_retention_has_waited(
    start: int, tokens: int, expected: int
) -> None:
    one = admission()
    request = add(one, "a", 200, f"{FASTKV},after=4")
    request.num_tokens = 240
    assert one.clip(request, start, tokens) == expected


def test_the_stash_is_free_once_tokens_are_chosen() -> None:
    """While retention waits for generated tokens; until then a preempted prompt needs it again."""
    one = admission()
    request = add(one, "a", 200, f"{FASTKV},after=4")
    free = one.free_pages
    assert schedule(one, request) == ["a"]
    for done in (96, 192, 200):
        assert one.free_pages == free - stash_pages(200)
        one.new_step()
        assert one.clip(request, request.num_computed_tokens, 96)
        request.num_computed_tokens = done
        assert one.past_prompt({"a"}) == []
    one.new_step()
    assert one.free_pages == free
    request.num_tokens = 201
    assert one.clip(request, 200, 1) == 1 and one.free_pages == free
    one.restart(request)
    assert one.clip(request, 0, 96) == 96 and one.free_pages == free - stash_pages(200)
    request.num_computed_tokens = 204
    assert one.past_prompt({"a"}) == [request]
    one.release("a")
    assert one.free_pages == free


def test_a_token_that_a_step_under_way_samples_stays() -> None:
    """Retention need not wait a step longer for it; drafted ones may be rejected."""
    one = admission()
    request = add(one, "a", 200, "snapkv:kv_floor=0,after=4")
    request.num_tokens = 203
    assert one.clip(request, 203, 1) == 0
    request.num_output_placeholders = 1
    assert one.clip(request, 203, 1) == 1


def test_what_drops_nothing_waits_for_nothing() -> None:
    one = admission()
    request = add(one, "a", 200, "fastkv:tsp_layer=3,tsp_floor=0,kv_floor=300,after=4")
    request.num_tokens = 240
    assert one.clip(request, 192, 30) == 8
    assert one.clip(request, 200, 30) == 30


def test_other_policies_are_left_alone() -> None:
    one = admission()
    assert one.clip(add(one, "a", 200, "full"), 150, 120) == 120
    assert one.free_pages == stash_pages(1024)


def test_a_clients_text_makes_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm.kvx.scheduler")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger.name)
    try:
        one = admission(stash_tokens=256)
        first, second = add(one, "a", 200), add(one, "b\nINFO all is well\x1b" + "c" * 9000, 200)
        one.clip(first, 0, 96)
        one.new_step()
        assert one.is_passed_over(second, is_ready=True, num_left=2)
        params = SamplingParams(extra_args={"kv_policy": "d\ne" * 9000})
        inside.run_in_full(
            SimpleNamespace(request_id="f\ng", sampling_params=params), "its\npolicy" * 9000
        )
    finally:
        logger.removeHandler(caplog.handler)
    waits, runs = dict.fromkeys(record.getMessage() for record in caplog.records)
    assert waits.startswith(r"Request 'b\nINFO all is well\x1bccc") and "9,019 characters" in waits
    assert runs.startswith(r"Request 'f\ng' runs under `full`: its\npolicyits\n")
    for line in (waits, runs):
        assert line.isprintable() and len(line) < 2500


def test_only_so_many_windows_are_spread() -> None:
    one = admission()
    requests = [add(one, str(i), 20, "snapkv:kv_floor=0") for i in range(SPLIT_WINDOWS + 1)]
    assert [one.clip(r, 12, 3) for r in requests] == [3] * SPLIT_WINDOWS + [0]
    assert one.clip(requests[-1], 12, 8) == 8  # A whole window needs no room.
    one.release("0")
    assert one.clip(requests[-1], 12, 3) == 3


def test_short_chunks_get_no_more_room_for_windows() -> None:
    """A slot is queries of every layer: 17 MB of Llama-3.1-8B's, at 64 tokens a window."""
    one = admission(long_prefill_token_threshold=3, max_num_seqs=256)
    requests = [add(one, str(i), 20, "snapkv:kv_floor=0") for i in range(256)]
    assert [one.clip(r, 12, 3) for r in requests] == [3] * SPLIT_WINDOWS + [0] * (
        256 - SPLIT_WINDOWS
    )
    for request in requests:
        assert one.clip(request, 15, 3) == 3, "its turn comes"
        one.release(request.request_id)


def test_a_full_stash_makes_prompts_wait() -> None:
    one = admission(stash_tokens=4 * STASH_PAGE)
    first, second = add(one, "a", 3 * STASH_PAGE), add(one, "b", 2 * STASH_PAGE)
    assert one.clip(first, 0, 96) == 96
    assert one.clip(second, 0, 96) == 0
    # Retention alone needs no stash.
    assert one.clip(add(one, "c", 500, "snapkv:kv_floor=0"), 0, 96) == 96
    first.num_computed_tokens = 3 * STASH_PAGE
    assert not one.past_prompt({"b": 1}), "another step"
    assert one.past_prompt({"a": 1, "b": 1}) == [first] and not one.past_prompt({"a": 1})
    one.release("a")
    assert one.clip(second, 0, 96) == 96
    one.remove_request("b")
    assert one.free_pages == 4


def test_what_was_not_scheduled_after_all_holds_nothing() -> None:
    """Else a request that waits for blocks starves one that these blocks wait for."""
    one = admission(stash_tokens=4 * STASH_PAGE)
    waits, preempted = add(one, "a", 3 * STASH_PAGE), add(one, "b", 2 * STASH_PAGE)
    assert one.clip(waits, 0, 96) == 96
    one.settle(running=[])
    assert one.free_pages == 4
    assert one.clip(preempted, 0, 96) == 96
    one.settle(running=[preempted])
    assert one.free_pages == 2
    one.restart(preempted)
    assert one.free_pages == 4


def schedule(to: PromptAdmission, *waiting: Any) -> list[str]:
    """One pass of vLLM's loop over its queue; those that begin."""
    began = []
    to.new_step()
    for number, request in enumerate(waiting):
        if not to.is_passed_over(request, is_ready=True, num_left=len(waiting) - number):
            if not to.clip(request, 0, 96):
                break
            began.append(request.request_id)
    return began


def test_the_queue_goes_on_behind_one_that_waits() -> None:
    one = admission(stash_tokens=4 * STASH_PAGE)
    a, b, c, d = (
        add(one, n, pages * STASH_PAGE) for n, pages in zip("abcd", (2, 3, 1, 1), strict=True)
    )
    full, snapkv = add(one, "full", 500, "full"), add(one, "snapkv", 500, "snapkv:kv_floor=0")
    assert schedule(one, a, b, c, full, d, snapkv) == ["a", "full", "snapkv"]
    one.settle(running=[a, full, snapkv])
    assert schedule(one, b, c, d) == []
    one.release("a")
    assert schedule(one, b, c, d) == ["b", "c"]


def test_one_that_vllm_passes_over_keeps_its_place() -> None:
    """For a reason that vLLM looks at later: output of before its preemption is on its way."""
    one = admission(stash_tokens=4 * STASH_PAGE)
    a, b, c = (add(one, n, pages * STASH_PAGE) for n, pages in zip("abc", (3, 2, 1), strict=True))
    one.new_step()
    assert not one.is_passed_over(a, is_ready=True, num_left=4)
    assert one.is_passed_over(b, is_ready=True, num_left=3), "a needs three pages of four"
    assert one.is_passed_over(c, is_ready=True, num_left=2), "b needs the fourth"


def test_one_that_is_not_ready_holds_no_place() -> None:
    """It waits for a grammar, not for the stash."""
    one = admission(stash_tokens=2 * STASH_PAGE)
    a, b = (add(one, n, 2 * STASH_PAGE) for n in "ab")
    one.new_step()
    assert one.is_passed_over(a, is_ready=False, num_left=2)
    assert not one.is_passed_over(b, is_ready=True, num_left=1)
    assert one.clip(b, 0, 96) == 96
    assert one.stash_waits == 0


def test_where_all_wait_the_loop_ends() -> None:
    """vLLM does not go through a long queue in every step; and all of them count as waiting."""
    one = admission(stash_tokens=2 * STASH_PAGE)
    a, b, c = (add(one, n, 2 * STASH_PAGE) for n in "abc")
    assert schedule(one, a, b, c) == ["a"]
    assert one.stash_waits == 2
    one.new_step()
    assert not one.is_passed_over(b, is_ready=True, num_left=2)
    assert one.clip(b, 0, 96) == 0
    assert one.is_passed_over(b, is_ready=True, num_left=3), "a third one, that needs no pages"


@pytest.mark.parametrize(
    "policy",
    [
        FASTKV,
        "snapkv:kv_floor=0",
        f"{FASTKV},kv_rate=1+snapkv:kv_floor=0",
        "gemfilter:layer=3,kv_floor=0",
    ],
)
def test_a_first_chunk_waits_for_no_window(policy: str) -> None:
    """A prompt that is no longer than its window keeps all, so that nothing scores it."""
    one = admission()
    for number in range(SPLIT_WINDOWS):
        assert one.clip(add(one, str(number), 20, "snapkv:kv_floor=0"), 12, 3) == 3
    settings = KVSettings.of({"kv_policy": policy}, num_layers=8)
    for length in range(1, 20):
        request = SimpleNamespace(
            request_id=f"of {length}",
            num_prompt_tokens=length,
            num_tokens=length,
            num_output_placeholders=0,
        )
        storages = stored(settings.policy, length)
        one.add_request(request, settings.policy, storages)  # type: ignore[arg-type]
        assert one.clip(request, 0, 1) == 1  # type: ignore[arg-type]


def test_waits_for_the_stash_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts once each, and seconds: of waits that are over, that last, and that were aborted."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    one = admission(stash_tokens=4 * STASH_PAGE)
    a, b = add(one, "a", 3 * STASH_PAGE), add(one, "b", 2 * STASH_PAGE)
    assert schedule(one, a) == ["a"]
    assert (one.stash_waits, one.stash_wait_seconds) == (0, 0)
    for seconds in (0, 2, 3):
        now[0] = 100.0 + seconds
        assert not schedule(one, b)
    assert (one.stash_waits, one.stash_wait_seconds) == (1, 3)
    one.release("a")
    assert schedule(one, b) == ["b"]
    now[0] = 110.0
    assert (one.stash_waits, one.stash_wait_seconds) == (1, 3)
    # Preempted, it waits again: it is the same prompt.
    one.restart(b)
    c = add(one, "c", 4 * STASH_PAGE)
    assert schedule(one, c) == ["c"]
    assert not schedule(one, b, add(one, "d", STASH_PAGE))
    now[0] = 114.0
    assert (one.stash_waits, one.stash_wait_seconds) == (2, 3 + 2 * 4)
    one.remove_request("b")
    one.remove_request("d")
    now[0] = 120.0
    assert (one.stash_waits, one.stash_wait_seconds) == (2, 11)

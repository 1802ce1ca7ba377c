"""The real ``vllm serve`` command: what it answers and refuses, asked as users ask."""

import random
import re
import string
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError
from support.served import (
    BLOCK,
    CUTOFF,
    FULL,
    LAYERS,
    LENGTH,
    MODEL,
    POLICIES,
    POLICY_IDS,
    Server,
    on_cpu,
)

pytestmark = on_cpu


@pytest.mark.parametrize("extra_body", POLICIES, ids=POLICY_IDS)
def test_completions_answer(server: Server, extra_body: dict) -> None:
    questions = [server.question() for _ in range(4)]
    answers = [server.text(prompt, extra_body=extra_body) for prompt, _ in questions]
    assert answers == [answer for _, answer in questions]


@pytest.mark.parametrize("extra_body", POLICIES, ids=POLICY_IDS)
def test_chat_answers(server: Server, extra_body: dict) -> None:
    prompt, answer = server.question()
    reply = server.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=4,
        extra_body=extra_body,
    )
    assert reply.choices[0].message.content == answer
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses", "messages"])
def test_a_policy_in_the_wrong_place_is_a_400(server: Server, route: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    asked = {"prompt": "hello"} if route == "completions" else {"messages": messages}
    body = {"model": MODEL, "max_tokens": 1, **asked}
    if route == "responses":
        body = {"model": MODEL, "max_output_tokens": 1, "input": "hello"}
    inside = {"kv_policy": "full"}
    for misplaced in (
        *(inside, {"KV-Policy": "full"}, {"extra_body": FULL}, {"metadata": inside}),
        *({"chat_template_kwargs": inside}, {"sampling_params": inside}),
    ):
        response = server.http.post(f"/v1/{route}", json=body | misplaced)
        assert response.status_code == 400
        assert 'send "vllm_xargs": {"kv_policy": "..."}' in response.text.replace('\\"', '"')
    assert server.http.post(f"/v1/{route}", json=body, params=inside).status_code == 400
    for xargs in (
        *({"policy": "full"}, {"kv_rate": 0.2}, {"kv_layout": ["full"]}, {"kv_other": 1}),
        *({"kv_policy": {"name": "full"}}, {"kv_policy": True}),
    ):
        response = server.http.post(f"/v1/{route}", json=body | {"vllm_xargs": xargs})
        (key,) = xargs
        message = response.json()["error"]["message"]
        assert response.status_code == 400 and key in message and "\n" not in message
    for passes in (FULL, {"vllm_xargs": {"kv_policy": None}}, {"vllm_xargs": {"a": 1}}):
        assert server.http.post(f"/v1/{route}", json=body | passes).status_code == 200


def test_policies_share_a_batch(server: Server) -> None:
    names = ["speed-4", "full", "speed-4:anchors=2", "speed-4:tail=3"] * 2
    questions = [server.question(length) for length in range(200, 200 + 33 * len(names), 33)]

    def ask(name: str, prompt: str) -> str:
        return server.text(prompt, extra_body={"vllm_xargs": {"kv_policy": name}})

    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(ask, names, [prompt for prompt, _ in questions]))
    assert answers == [answer for _, answer in questions]


def test_a_prefix_is_used_again_or_counted(server: Server) -> None:
    prompt, answer = server.question()

    def asked(policy: str) -> dict[str, int]:
        body = {"vllm_xargs": {"kv_policy": policy}}

        def ask() -> None:
            assert server.text(prompt, extra_body=body) == answer

        return server.spent(policy, ask)

    first, again = asked("speed-4"), asked("speed-4")
    assert again["layer_tokens_computed"] < first["layer_tokens_computed"] / 4
    assert first["prefix_not_shared"] == again["prefix_not_shared"] == 0
    cold, warm = asked("full"), asked("full")
    assert cold["prompt_tokens"] == LENGTH, "the upper layers are not there"
    assert warm["prompt_tokens"] + warm["prefix_hit"] == LENGTH < 2 * warm["prefix_hit"]
    assert cold["prefix_not_shared"] == warm["prefix_not_shared"] == 0


@pytest.mark.parametrize("extra_body", POLICIES, ids=POLICY_IDS)
def test_streaming_gives_the_same_text(server: Server, extra_body: dict) -> None:
    prompt, _ = server.question()
    options = {"max_tokens": 24, "extra_body": extra_body | {"ignore_eos": True}}
    chunks = list(server.complete(prompt, stream=True, **options))
    assert len(chunks) > 12
    assert "".join(chunk.choices[0].text for chunk in chunks) == server.text(prompt, **options)


CHAT_BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": CHAT_BODY,
    "/v1/messages": CHAT_BODY,
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ANSWERS)
def test_answers_say_their_policy(server: Server, log: Path, route: str, stream: bool) -> None:
    """In a header, in their usage, and in the access log."""
    body: dict[str, Any] = {"model": MODEL, **ANSWERS[route], "stream": stream}
    if stream and "completions" in route:
        body["stream_options"] = {"include_usage": True}
    for asked, ran in ((None, f"speed-{CUTOFF}"), ("full", "full"), ("fier-64", "fier-64")):
        xargs = {"vllm_xargs": {"kv_policy": asked}} if asked else {}
        reply = server.http.post(route, json={**body, **xargs})
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-kv-policy"] == ran
        assert f'"kv_policy":"{ran}"' in reply.text.replace('": "', '":"')
        assert re.search(rf'"POST {route} HTTP/1.1" 200 OK kv_policy={ran}\b', log.read_text())
    bad = server.http.post(route, json={**body, "vllm_xargs": {"kv_policy": "speed-5"}})
    assert "x-kv-policy" not in bad.headers and bad.status_code == 400


def test_openais_client_shows_the_policy(server: Server) -> None:
    answer = server.complete("hello", extra_body=FULL)
    assert answer.usage.kv_policy == "full"
    raw = server.openai.completions.with_raw_response.create(model=MODEL, prompt="a", max_tokens=1)
    assert raw.headers["x-kv-policy"] == f"speed-{CUTOFF}"


def test_what_answers_nothing_says_no_policy(server: Server) -> None:
    reply = server.http.post("/tokenize", json={"model": MODEL, "prompt": "hello"})
    assert reply.status_code == 200 and "x-kv-policy" not in reply.headers
    assert "x-kv-policy" not in server.http.get("/health").headers


def test_several_answers_to_one_prompt(server: Server) -> None:
    prompt, answer = server.question()
    # vLLM has n = 1 alone with temperature 0; of the likeliest token there is one, too.
    reply = server.complete(prompt, n=2, temperature=1, extra_body={"top_k": 1})
    assert [choice.text for choice in reply.choices] == [answer, answer]


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"extra_body": {"min_p": 0.1}}, {}])
def test_sampling_answers(server: Server, sampling: dict) -> None:
    prompt, answer = server.question()
    assert server.text(prompt, temperature=0.2, seed=1, **sampling) == answer


@pytest.mark.parametrize("extra_body", POLICIES, ids=POLICY_IDS)
def test_structured_output(server: Server, extra_body: dict) -> None:
    prompt, answer = server.question()

    def under(**grammar: Any) -> str:
        body = extra_body | {"structured_outputs": grammar}
        return server.text(prompt, max_tokens=16, extra_body=body)

    assert under(choice=[" nothing.", answer]) == answer
    assert under(regex=r" [a-z]+\.") == answer
    assert re.fullmatch("[0-9]{4}", under(regex="[0-9]{4}"))


@pytest.mark.parametrize("extra_body", POLICIES, ids=POLICY_IDS)
def test_logprobs(server: Server, extra_body: dict) -> None:
    prompt, answer = server.question()
    logprobs = server.complete(prompt, logprobs=3, extra_body=extra_body).choices[0].logprobs
    assert "".join(logprobs.tokens).startswith(answer)
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == max(top.values())
        assert -0.7 < chosen <= 0


@pytest.mark.parametrize("extra_body", POLICIES, ids=POLICY_IDS)
def test_a_client_that_leaves_leaves_no_blocks(server: Server, extra_body: dict) -> None:
    policy = extra_body.get("vllm_xargs", {}).get("kv_policy", "speed-4")
    prompt, _ = server.question()
    before = server.status()["counters"].get(policy, {}).get("layer_tokens_computed", 0)
    skipped = 0 if policy == "full" else (LENGTH - 2) * (LAYERS - CUTOFF + 1)

    def decoded(counters: dict[str, int]) -> int:
        """Tokens of the answer that were computed by then."""
        computed = counters["layer_tokens_computed"] - before
        return (computed - (LENGTH * LAYERS - skipped)) // LAYERS

    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1400, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True} | extra_body
    with server.slowed():
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            # Workers are told some four times a second, so the first answer may be from before.
            for _ in range(20):
                held = server.counters(policy)
                if held["blocks_held"]:
                    break
            blocks = -(-LENGTH // BLOCK)
            upper = blocks if policy == "full" else 1
            # Meanwhile the answer grows in both groups.
            grown = 2 * (decoded(held) // BLOCK + 1)
            assert blocks + upper <= held["blocks_held"] <= blocks + upper + grown
            assert abs(held["blocks_saved"] - (blocks - upper)) <= 1
        assert decoded(server.holds_no_blocks(policy)) < 1399
    rest = server.spent(policy, lambda: time.sleep(0.5))
    assert not any(rest.values())


MALFORMED = {
    "unknown": ("sped-4", "unknown policy 'sped-4'.*did you mean speed-K.*allowed: full, speed-K"),
    "empty": ("", "empty policy name.*allowed: full, speed-K"),
    "zero": ("speed-0", "K must be an integer of at least 1, got 0.*for example speed-24"),
    "fraction": ("speed-4.5", "K must be an integer of at least 1, got 4.5"),
    "all layers": ("speed-8", "8 layers; use speed-1 .. speed-7"),
    "no tail": ("speed-4:tail=0", "tail must be an integer of at least 1, got 0"),
    "no parameter": ("speed-4:tial=1", "tial.*tail"),
    "other layout": (
        "speed-5",
        "does not fit this server.*--kv-policy speed-5.*add speed-5 to its --kv-layout",
    ),
    "no method together": (
        "fastkv:kv_rate=1+streamingllm:recent=1020",
        "compose it with speed-K, or retain",
    ),
    "no retention": (
        "snapkv:kv_rate=0.1+fier-64",
        "needs retention and a window of 8 tokens: start",
    ),
    "over the budget": (
        "fier-65",
        "a sidecar of .*up to 64.*needs a sidecar .*up to 65.*--kv-layout",
    ),
    "other sidecar": (
        "speed-4+quest-64",
        r"needs a sidecar of bounds of pages of 16 .*: request speed-4\+fier-64, which fits",
    ),
    "group": ("fier-64:group=128", "group must be no larger than the budget of 64 tokens, got 128"),
    "number": (4, "must be a string such as 'speed-24' or 'full', got 4"),
    "list": (["speed-4"], r"must be a string such as 'speed-24' or 'full', got \['speed-4'\]"),
    "object": (
        {"name": "speed-4"},
        "^kv_policy must be a string such as .*, got {'name': 'speed-4'}",
    ),
}


@pytest.mark.parametrize(("name", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_bad_policy_is_a_400(server: Server, name: Any, message: str) -> None:
    prompt, _ = server.question(64)
    response = server.post(prompt, vllm_xargs={"kv_policy": name})
    assert response.status_code == 400
    assert re.search(message, response.json()["error"]["message"], re.DOTALL | re.IGNORECASE)


def test_malformed_names_never_pass(server: Server) -> None:
    rng = random.Random(0)
    prompt, answer = server.question(64)
    for _ in range(50):
        name = "speed-4" + "".join(rng.choices(string.printable + "é\0漢", k=rng.randint(1, 12)))
        if name.strip() == "speed-4" or re.fullmatch(r"speed-4\d+", name):
            continue
        response = server.post(prompt, vllm_xargs={"kv_policy": name})
        assert response.status_code == 400, name
    assert server.text(prompt) == answer


def test_a_misspelled_key_is_a_400(server: Server) -> None:
    with pytest.raises(BadRequestError, match=r"'kv_polcy'.*did you mean 'kv_policy'"):
        server.complete("a", extra_body={"vllm_xargs": {"kv_polcy": "full"}})


@pytest.mark.parametrize("body", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_prompt_logprobs_need_full(server: Server, body: dict) -> None:
    prompt, _ = server.question(200)
    response = server.post(prompt, **body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert 'send vllm_xargs={"kv_policy": "full"}' in message
    response = server.post(prompt, **body, **FULL)
    assert response.status_code == 200
    choice = response.json()["choices"][0]
    if "echo" in body:
        logprobs = choice["logprobs"]["token_logprobs"][1:200]
    else:
        entries = [list(entry.values()) for entry in choice["prompt_logprobs"][1:]]
        assert all(1 <= token["rank"] <= 2048 for entry in entries for token in entry)
        logprobs = [entry[0]["logprob"] for entry in entries]
    assert len(logprobs) == 199
    assert all(logprob <= 0 for logprob in logprobs)

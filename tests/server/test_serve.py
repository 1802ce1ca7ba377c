"""The real ``vllm serve`` command: one server with ``--kv-policy speed-4``, asked as users ask.

It has room for retrieval too, for requests that name it.
"""

import random
import re
import shutil
import string
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import vllm
from openai import BadRequestError, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from soak import drain
from support.nightly import nightly
from transformers import AutoTokenizer

from benchmarks.checkpoint.prompts import make_prompt
from benchmarks.common.server import CHECKPOINT, cpu_environment, log_tail, serving, vllm_command
from vllm_kvx.cache.latency import FIRST_TOKEN_BOUNDS, PER_TOKEN_BOUNDS
from vllm_kvx.policy.counted import MAX_POLICIES
from vllm_kvx.records.tuned_weights import Agreement, TunedRecord
from vllm_kvx.server.refusal_reasons import Reason

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="serves with vLLM's CPU build")

MODEL = "lookup"
LAYERS, CUTOFF, BLOCK = 8, 4, 32
LENGTH = 500
FLAGS = [
    str(CHECKPOINT),
    *("--served-model-name", MODEL),
    *("--kv-policy", f"speed-{CUTOFF}"),
    # Triton's interpreter compares bfloat16 by its bits.
    *("--dtype", "float32"),
    *("--block-size", str(BLOCK)),
    *("--max-model-len", "2048"),
    *("--kv-layout", "fier-64", "speed-4+fier-64"),
    *("--additional-config", '{"kv_recall_every": 1}'),
    *("--enforce-eager", *drain.FLAGS),
]
FULL = {"vllm_xargs": {"kv_policy": "full"}}
POLICIES = [{}, FULL]
POLICY_IDS = ["default", "full"]


class Server:
    """A running server, as a client sees it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=60)
        self.openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
        self._seed = 0
        self.was_asked_to_end = False

    def question(self, length: int = LENGTH) -> tuple[str, str]:
        """A document that no request had before, and its answer."""
        self._seed += 1
        return make_prompt(self._seed, length, self.tokenizer)

    def complete(self, prompt: str, **body: Any) -> Any:
        """An answer through the OpenAI client, greedy unless `body` says otherwise."""
        known = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 4}
        return self.openai.completions.create(**(known | body))

    def text(self, prompt: str, **body: Any) -> str:
        return self.complete(prompt, **body).choices[0].text

    def post(self, prompt: str, **body: Any) -> httpx.Response:
        """The bare response to a completion request."""
        known = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 2}
        return self.http.post("/v1/completions", json=known | body)

    def status(self) -> dict[str, Any]:
        time.sleep(0.3)  # The server answers with what it read up to 0.25 s ago.
        return self.http.get("/v1/kv_policy").raise_for_status().json()

    def counters(self, policy: str) -> dict[str, int]:
        return self.status()["counters"][policy]

    def spent(self, policy: str, ask: Callable[[], Any]) -> dict[str, int]:
        """How far `ask` moved the policy's counters, which begin with its first request."""
        before = self.status()["counters"].get(policy, {})
        ask()
        after = self.counters(policy)
        return {k: n - before.get(k, 0) for k, n in after.items() if isinstance(n, int)}

    def metrics(self) -> dict[tuple[str, str], float]:
        """Our samples, by name and what tells them apart within it, if it is one label."""
        return {
            (name, labels.get("policy", labels.get("reason", labels.get("server_policy")))): value
            for name, labels, value in self.samples()
            if not {"layer", "le"} & labels.keys()
        }

    def first_tokens(self, policy: str) -> float:
        """Requests under the policy whose first token was timed."""
        wanted = {"policy": policy, "le": "+Inf"}.items()
        return sum(
            value
            for name, labels, value in self.samples()
            if name == "vllm_kvx:first_token_bucket_total" and wanted <= labels.items()
        )

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        """Our samples: name, labels and value."""
        time.sleep(0.3)
        return [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(self.http.get("/metrics").text)
            for sample in family.samples
            if sample.name.startswith("vllm_kvx:") and not sample.name.endswith("_created")
        ]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve") / "server.log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[Server]:
    """It serves the demo checkpoint, beside which lies a record that it was tuned for speed-4."""
    model = log.parent / "model"
    shutil.copytree(CHECKPOINT, model)
    figures: Agreement = {"kl": 0.03, "greedy": 0.971, "tokens": 400}
    TunedRecord(
        **{"policy": f"speed-{CUTOFF}", "original": "demo", "layers": LAYERS, "method": "full"},
        **{"loss": "self-distillation", "data": {}, "training": {}, "versions": {}},
        **{"agreement": {"before": figures, "after": figures}, "command": "c", "date": "d"},
    ).write(model)
    # Tests of tools that ran before in this process may have made vLLM's log quiet.
    loud = cpu_environment() | {"VLLM_LOGGING_LEVEL": "INFO"}
    with serving([str(model), *FLAGS[1:]], log, loud) as url:
        yield Server(url)


@pytest.fixture(autouse=True)
def server_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shows the end of the server's log if a test brought the server down."""
    yield
    if "server" not in request.fixturenames:
        return
    server = request.getfixturevalue("server")
    if server.was_asked_to_end:
        return
    try:
        server.http.get("/health").raise_for_status()
    except httpx.HTTPError as error:
        (log,) = request.getfixturevalue("tmp_path_factory").getbasetemp().glob("serve*/server.log")
        pytest.exit(f"the server is gone: {error!r}\n{log_tail(log, 150)}", returncode=1)


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


def test_tuned_weights_are_told(server: Server, log: Path) -> None:
    told = server.status()
    assert told["tuned_for"]["policy"] == "speed-4" and told["tuned_for"]["original"] == "demo"
    assert told["matches_tuning"]["speed-4"] and told["matches_tuning"]["speed-4+fier-64"]
    said = "weights tuned for speed-4 (by self-distillation of demo, held-out agreement 97.1% of"
    assert log.read_text().count(said) == 1
    prompt, _ = server.question()
    server.text(prompt, extra_body={"vllm_xargs": {"kv_policy": "speed-4:tail=2"}})
    assert server.status()["matches_tuning"]["speed-4:tail=2"] is False


def test_the_pool_is_told_beside_vllms_line(server: Server, log: Path) -> None:
    text = log.read_text()
    number = r"([\d,]+)"

    def found(pattern: str) -> list[int]:
        match = re.search(pattern, text)
        assert match is not None, pattern
        return [int(re.sub("[,.]", "", each)) for each in match.groups()]

    tokens, longest, fit = found(
        rf"CPU KV cache size: {number} tokens, Maximum concurrency for {number} tokens per "
        r"request: (\d+\.\d\d)x"
    )
    blocks, prompt, ours, of, stock = found(
        rf"KV pool: {number} blocks hold {number} prompt tokens under speed-{CUTOFF} once prompts "
        rf"are in: (\d+\.\d\d) prompts of --max-model-len {number}, and .*x the {number} tokens of"
    )
    [named] = found(rf'KV pool: the "KV cache size: {number} tokens" of vLLM')
    assert named == tokens and of == longest
    layout = server.status()["layout"]
    assert blocks == layout["num_blocks"] and prompt == layout["pool_prompt_tokens"]
    assert stock == layout["stock_pool_tokens"]
    assert abs(ours / 100 - prompt / longest) < 0.01 and abs(fit / 100 - tokens / longest) < 0.01
    # Half of the layers store prompts; all of them store what vLLM counts, and a sidecar too.
    assert 1.9 * tokens < prompt < 2.1 * tokens
    assert tokens <= stock * 1.01


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
    prompt, _ = server.question()
    policy = extra_body.get("vllm_xargs", {}).get("kv_policy", "speed-4")
    time.sleep(0.3)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1400, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True} | extra_body
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        # Workers are told some four times a second, so the first answer may be from before.
        for _ in range(20):
            held = server.counters(policy)
            if held["blocks_held"]:
                break
            time.sleep(0.1)
        blocks = -(-LENGTH // BLOCK)
        upper = blocks if policy == "full" else 1
        # The answer may have grown into another block in each group.
        assert blocks + upper <= held["blocks_held"] <= blocks + upper + 2
        assert abs(held["blocks_saved"] - (blocks - upper)) <= 1
    # To the end it would take far longer.
    for _ in range(10):
        if server.counters(policy)["blocks_held"] == 0:
            break
    else:
        pytest.fail("the request still holds blocks")
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
    "no method together": ("fastkv:kv_rate=1+streamingllm", "compose it with speed-K, or retain"),
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


def test_status(server: Server) -> None:
    status = server.status()
    assert status["policy"] == "speed-4"
    assert status["parameters"] == {
        "propagate": {"method": "speed", "cutoff": CUTOFF, "anchors": 1, "tail": 1}
    }
    assert status["num_layers"] == LAYERS
    assert status["current"] is True
    layout = status["layout"]
    assert layout["splits"] == [CUTOFF]
    assert [(len(group["layers"]), group["segment"]) for group in layout["groups"]] == [
        (CUTOFF, 0),
        (LAYERS - CUTOFF, 1),
    ]
    ratio = layout["pool_prompt_tokens"] / layout["stock_pool_tokens"]
    # Of 32 tokens and 64 channels a code bit each and two float16, beside float32 keys and values.
    assert ratio == pytest.approx(LAYERS / CUTOFF / (1 + 1 / 32), rel=0.001)
    sidecar = {"has_codes": True, "group": 32, "reduction": "max", "max_units": 64}
    sidecar["reuse_layers"] = 1
    assert layout["sidecar"] == sidecar


def test_counters_and_metrics_grow_by_what_was_sent(server: Server) -> None:
    before = server.metrics()
    # The layer below the cutoff stores all rows and runs two.
    skipped = (LENGTH - 2) * (LAYERS - CUTOFF + 1)
    for policy, saved in (("speed-4", skipped), ("full", 0)):
        prompt, _ = server.question()
        body = {"vllm_xargs": {"kv_policy": policy}}
        timed = server.first_tokens(policy)
        spent = server.spent(policy, lambda: server.text(prompt, max_tokens=1, extra_body=body))  # noqa: B023
        assert server.first_tokens(policy) - timed == 1
        assert spent == {
            "requests": 1,
            "prompt_tokens": LENGTH,
            "layer_tokens_computed": LENGTH * LAYERS - saved,
            "layer_tokens_skipped": saved,
            "tokens_propagated": 0,
            "blocks_freed": 0,
            "entries_retained": 0,
            "entries_dropped": 0,
            "entries_held_in_decode": 0,
            "entries_scored": 0,
            "entries_read": 0,
            "retrieval_steps": 0,
            "dense_fallbacks": 0,
            "blocks_held": 0,
            "blocks_saved": 0,
            "prefix_not_shared": 0,
            "prefix_hit": 0,
            "prefix_cached": 0,
            "tokens_drafted": 0,
            "tokens_accepted": 0,
            "prefix_states": 0,
            "kv_bytes_moved": 0,
            "stash_tokens_used": 0,
            "recall_samples": 0,
        }
        after = server.metrics()
        for name in ("requests", "prompt_tokens", "layer_tokens_computed", "layer_tokens_skipped"):
            key = (f"vllm_kvx:{name}_total", policy)
            assert after.get(key, 0) - before.get(key, 0) == spent[name], key
    assert after["vllm_kvx:layer_tokens_skipped_total", "speed-4"] > 0
    assert after.get(("vllm_kvx:layer_tokens_skipped_total", "full"), 0) == 0
    layout = server.status()["layout"]
    assert after["vllm_kvx:kv_pool_tokens", "speed-4"] == layout["pool_prompt_tokens"]
    assert after["vllm_kvx:stock_kv_pool_tokens", "speed-4"] == layout["stock_pool_tokens"]


@pytest.mark.parametrize("policy", ["fier-64", "speed-4+fier-64"])
def test_retrieval_answers_and_is_counted(server: Server, policy: str) -> None:
    prompt, answer = server.question()
    body = {"vllm_xargs": {"kv_policy": policy}, "ignore_eos": True}
    before, samples = server.metrics(), server.status()["retrieval"]["recall_samples"]
    texts: list[str] = []
    spent = server.spent(policy, lambda: texts.append(server.text(prompt, extra_body=body)))
    assert texts[0].startswith(answer)
    # Of four tokens prefill gave the first. Two layers are always read whole.
    lower, upper = (sum(n + i for i in (1, 2, 3)) for n in (LENGTH, 2))
    choosing = 6 if policy == "fier-64" else CUTOFF - 2
    few = (LAYERS - 2 - choosing) * upper
    expected = {
        "entries_held_in_decode": (2 + choosing) * lower + few,
        "entries_scored": choosing * lower,
        "entries_read": 2 * lower + choosing * 3 * 64 + few,
    }
    steps = {"retrieval_steps": 3, "dense_fallbacks": 0}
    assert {key: spent[key] for key in (*expected, *steps)} == expected | steps
    after = server.metrics()
    for name, moved in {f"kv_{k}": n for k, n in expected.items()}.items() | steps.items():
        key = (f"vllm_kvx:{name}_total", policy)
        assert after.get(key, 0) - before.get(key, 0) == moved, key
    retrieval = server.status()["retrieval"]
    assert retrieval["ops"] == "torch" and retrieval["seconds_in_sidecar_writes"] > 0
    # On a CPU every length may try it.
    assert (retrieval["policy"], retrieval["dense_below"], retrieval["auto"]) == ("fier-64", 65, 0)
    assert retrieval["dense_below_batch"] == 65
    assert retrieval["recall_samples"] - samples == 3 * choosing * 4  # steps, layers, query heads
    assert 0 < retrieval["recall"] <= 1
    measured = server.status()["counters"][policy]
    assert measured["recall_samples"] == spent["recall_samples"] == 3 * choosing * 4
    assert after["vllm_kvx:retrieval_recall", policy] == pytest.approx(measured["recall"])
    assert after["vllm_kvx:retrieval_crossover_tokens", f"speed-{CUTOFF}"] == 0
    assert after["vllm_kvx:retrieval_dense_below_tokens", f"speed-{CUTOFF}"] == 65
    assert after["vllm_kvx:retrieval_dense_below_batch_tokens", f"speed-{CUTOFF}"] == 65
    written = after["vllm_kvx:sidecar_write_seconds_total", f"speed-{CUTOFF}"]
    assert written >= retrieval["seconds_in_sidecar_writes"] > 0


def test_the_server_says_what_it_is(server: Server) -> None:
    infos = {name: labels for name, labels, value in server.samples() if name.endswith("_info")}
    build = infos["vllm_kvx:build_info"]
    assert (build["model_name"], build["server_policy"]) == (MODEL, f"speed-{CUTOFF}")
    assert build["version"] == server.status()["version"]
    assert build["vllm_version"] == vllm.__version__
    assert build["torch_version"] == torch.__version__
    assert "KV groups split at layer 4" in build["layout"]
    ops = infos["vllm_kvx:retrieval_ops_info"]
    expected = ("torch", "torch", "the device is a CPU")
    assert (ops["score"], ops["attend"], ops["reason"]) == expected


def test_refusals_are_counted_by_reason(server: Server) -> None:
    def refused() -> dict[str, float]:
        name = "vllm_kvx:requests_refused_total"
        return {labels["reason"]: n for own, labels, n in server.samples() if own == name}

    before = refused()
    assert set(before) == set(Reason)
    prompt, _ = server.question(64)
    for name in ("sped-4", "speed-5", 4):
        assert server.post(prompt, vllm_xargs={"kv_policy": name}).status_code == 400
    assert server.post(prompt, prompt_logprobs=1).status_code == 400
    assert server.post(prompt, kv_policy="full").status_code == 400
    assert server.post(prompt, use_beam_search=True, n=2).status_code == 400
    assert server.post(prompt, max_tokens=-1).status_code == 400, "vLLM's own, not counted"
    now = refused()
    reasons = ("malformed", "no_room", "not_a_string", "prompt_logprobs", "misplaced")
    moved = {reason: now[reason] - before[reason] for reason in now}
    assert moved == dict.fromkeys(Reason, 0) | dict.fromkeys((*reasons, "beam_search"), 1)


def test_a_shared_prefix_counts_once(server: Server) -> None:
    """Ten requests hold one prefix; stock would hold it in every group, and once as well."""
    prompt, _ = server.question(1000)
    server.text(prompt)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 900, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    answers = []
    with ExitStack() as stack:
        for _ in range(10):
            stream = server.http.stream("POST", "/v1/completions", json=body)
            answers.append(stack.enter_context(stream).iter_lines())
            next(answers[-1])
        counters = server.counters("speed-4")
    shared = 998 // BLOCK
    own = 10 * (1 + 1)  # Of every request the rest of the prompt, and the upper layers' block.
    # The answers may have grown into further blocks meanwhile.
    assert shared + own <= counters["blocks_held"] <= shared + own + 10 * 2 * 4
    stock = 2 * (shared + 10)
    assert 0 < counters["blocks_saved"] <= stock
    for _ in range(10):
        if server.counters("speed-4")["blocks_held"] == 0:
            break
    else:
        pytest.fail("the requests still hold blocks")


def test_odd_policies_leave_the_servers_own_alone(server: Server) -> None:
    """More policies than are kept apart, from any client: rows are bounded, and kept for its own.

    It stands after what counts other policies by name: those that come later are `other`.
    """
    names = [f"speed-4:anchors={a},tail={t}" for a in range(2, 12) for t in range(2, 9)]
    assert len(names) > MAX_POLICIES

    def ask(name: str) -> int:
        return server.post("a", max_tokens=1, vllm_xargs={"kv_policy": name}).status_code

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, names)) == {200}
    for policy in ("speed-4", "fier-64", "speed-4+fier-64", "full"):
        body = {"vllm_xargs": {"kv_policy": policy}}
        spent = server.spent(policy, lambda: server.text("a b", max_tokens=1, extra_body=body))  # noqa: B023
        assert spent["requests"] == 1
    counters = server.status()["counters"]
    assert len(counters) == MAX_POLICIES + 5 and counters["other"]["requests"] >= 6
    series = [name for name, labels, _ in server.samples() if "policy" in labels]
    assert series.count("vllm_kvx:requests_total") == MAX_POLICIES + 5
    bounds = max(len(FIRST_TOKEN_BOUNDS), len(PER_TOKEN_BOUNDS)) + 1
    assert max(map(series.count, series)) <= (MAX_POLICIES + 5) * max(LAYERS, bounds)


def test_sigterm_lets_answers_end(server: Server, log: Path) -> None:
    """It stands after all that needs the server."""
    server.was_asked_to_end = True
    drain.end_by_sigterm(server.url, log)


def run_vllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [vllm_command(), "serve", *arguments],
        capture_output=True,
        text=True,
        env=cpu_environment(),
        timeout=120,
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-policy", "sped-4"], "error: argument --kv-policy: .*did you mean speed-K"),
        pytest.param(
            ["--kv-policy", "speed-8"],
            "error: kv_policy: speed-8: this model has 8 layers; use",
            marks=nightly,
        ),
        (
            ["--enable-prompt-embeds"],
            "error: KV policy .*\n.*  - prompt embeddings .*: drop --enable-prompt-embeds",
        ),
    ],
    ids=["unknown", "all layers", "refused"],
)
def test_a_bad_start_says_what_to_change(flags: list[str], message: str) -> None:
    """With vLLM's log and nothing else before it."""
    done = run_vllm(*FLAGS, *flags)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    last = "\n".join(done.stderr.strip().splitlines()[-2:])
    assert re.search(message, last), last


def test_help_shows_the_flag() -> None:
    done = run_vllm("--help=KVPolicy")
    assert done.returncode == 0
    assert "--kv-policy POLICY" in done.stdout

"""What OpenAI's client gets from a server, by policy: every kind of request, against `full`'s.

    KVX_CPU=1 python -m benchmarks.serving.client_suite MODEL --output FILE

One server, whose requests name their policy. Each kind is asked under every policy at temperature
0, and judged by what it has to be: JSON of its schema, a stream that says what the reply says,
three choices, an end before the stop string. Beside that stands whether the text is `full`'s.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.about import about, command_line
from benchmarks.common.files import write_json
from benchmarks.common.names import served
from benchmarks.common.server import cpu_environment, serving

POLICIES = (
    "full",
    "fier-64:dense_below=0",
    "snapkv:kv_rate=0.2",
    "fastkv:tsp_layer=15",
    "speed-24",
)
NAME = "client-suite"
SHORT = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
CITIES, SIZES = ("Paris", "London", "Rome"), ("small", "large")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": list(CITIES)}, "size": {"enum": list(SIZES)}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a city up.",
        "parameters": SCHEMA,
        "strict": True,  # vLLM holds arguments to the schema of such functions alone.
    },
}
# Some 1,000 tokens, more than what every policy keeps of a prompt.
LONG = [
    {
        "role": "user",
        "content": " ".join(
            f"Shop {i} of Rome sells {i % 9 + 2} kinds of bread." for i in range(75)
        )
        + " Which city is this about, and is it small or large?",
    }
]


class Failed(Exception):
    """A reply is not what it has to be."""


def check(true: object, what: str) -> None:
    if not true:
        raise Failed(what)


def is_object(text: str) -> None:
    """Checks that `text` is JSON of `SCHEMA`, and not more of it white space than needed."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise Failed(f"not JSON: {text[:200]!r}") from error
    check(set(found) == {"city", "size"}, f"keys {sorted(found)}")
    check(found["city"] in CITIES and found["size"] in SIZES, f"values {found}")


class Suite:
    """The kinds of requests, asked of one server under one policy.

    Every method asks, checks, and returns the text.
    """

    def __init__(self, client: Any, policy: str) -> None:
        self._client, self._policy = client, policy

    def kinds(self) -> dict[str, Callable[[], str]]:
        """By name."""
        names = (
            "chat",
            "stream",
            "completion",
            "logprobs",
            "stop",
            "choices",
            "tool",
            "tool_stream",
            "schema",
            "schema_long",
            "chat_long",
            "responses_header",
        )
        return {name: getattr(self, name) for name in names}

    def _raw(self, messages: Any = SHORT, **more: Any) -> Any:
        """The reply with its headers."""
        more = {"max_tokens": 16, "temperature": 0, **more}
        raw = self._client.chat.completions.with_raw_response.create(
            model=NAME, messages=messages, extra_body=self._extra(), **more
        )
        check(raw.headers.get("x-kv-policy"), "no header x-kv-policy")
        return raw

    def _chat(self, messages: Any = SHORT, **more: Any) -> Any:
        return self._raw(messages, **more).parse()

    def _extra(self) -> dict[str, Any]:
        return {"vllm_xargs": {"kv_policy": self._policy}}

    def chat(self) -> str:
        reply = self._chat()
        (choice,) = reply.choices
        check(choice.message.content.strip(), "an empty answer")
        check(reply.usage.completion_tokens <= 16, "more tokens than asked for")
        check(reply.usage.kv_policy, "no kv_policy in usage")
        return str(choice.message.content)

    def chat_long(self) -> str:
        reply = self._chat(LONG, max_tokens=12)
        check(reply.usage.prompt_tokens > 900, f"{reply.usage.prompt_tokens} prompt tokens")
        return str(reply.choices[0].message.content)

    def stream(self) -> str:
        said, usage, ends = "", None, []
        for chunk in self._stream(stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                said += choice.delta.content or ""
                ends += [choice.finish_reason] if choice.finish_reason else []
        check(len(ends) == 1, f"ends {ends}")
        check(usage is not None and usage.kv_policy, "no kv_policy in the stream's usage")
        check(said == self.chat(), f"a stream says {said!r}")
        return said

    def _stream(self, messages: Any = SHORT, **more: Any) -> Iterator[Any]:
        more = {"max_tokens": 16, "temperature": 0, **more}
        yield from self._client.chat.completions.create(
            model=NAME, messages=messages, stream=True, extra_body=self._extra(), **more
        )

    def completion(self) -> str:
        reply = self._client.completions.create(
            model=NAME,
            prompt="The days of the week are Monday, Tuesday,",
            max_tokens=8,
            temperature=0,
            extra_body=self._extra() | {"ignore_eos": True},
        )
        check(reply.usage.completion_tokens == 8, f"{reply.usage.completion_tokens} tokens, not 8")
        return str(reply.choices[0].text)

    def logprobs(self) -> str:
        reply = self._chat(logprobs=True, top_logprobs=3)
        entries = reply.choices[0].logprobs.content
        check(len(entries) == reply.usage.completion_tokens, "not one entry a token")
        for entry in entries:
            check(len(entry.top_logprobs) == 3, "not three alternatives")
            best = max(each.logprob for each in entry.top_logprobs)
            check(entry.logprob == best <= 0, "greedy, and not the likeliest token")
        text = str(reply.choices[0].message.content)
        check("".join(entry.token for entry in entries).startswith(text), "other tokens than text")
        return text

    def stop(self) -> str:
        whole = self._chat(max_tokens=24).choices[0].message.content
        words = whole.split()
        check(len(words) > 1, f"an answer of one word: {whole!r}")
        end = words[1]
        choice = self._chat(max_tokens=24, stop=[end]).choices[0]
        check(choice.finish_reason == "stop", f"ended by {choice.finish_reason}")
        check(choice.message.content == whole[: whole.index(end)], f"{choice.message.content!r}")
        return str(choice.message.content)

    def choices(self) -> str:
        reply = self._chat(n=3, temperature=0.8, seed=1)
        check([each.index for each in reply.choices] == [0, 1, 2], "not three choices")
        texts = [each.message.content for each in reply.choices]
        again = [each.message.content for each in self._chat(n=3, temperature=0.8, seed=1).choices]
        check(texts == again, "another answer by the same seed")
        return "\n".join(texts)

    def tool(self) -> str:
        chosen = {"type": "function", "function": {"name": "look_up"}}
        reply = self._chat(tools=[TOOL], tool_choice=chosen, max_tokens=96)
        message = reply.choices[0].message
        check(len(message.tool_calls or ()) == 1, f"no call: {message.content!r}")
        call = message.tool_calls[0]
        check(call.function.name == "look_up", f"calls {call.function.name}")
        is_object(call.function.arguments)
        return str(call.function.arguments)

    def tool_stream(self) -> str:
        chosen = {"type": "function", "function": {"name": "look_up"}}
        said = ""
        for chunk in self._stream(tools=[TOOL], tool_choice=chosen, max_tokens=96):
            for choice in chunk.choices:
                said += "".join(c.function.arguments or "" for c in choice.delta.tool_calls or ())
        is_object(said)
        return said

    def _schema(self, messages: Any) -> str:
        form = {"name": "answer", "schema": SCHEMA, "strict": True}
        form = {"type": "json_schema", "json_schema": form}
        text = self._chat(messages, response_format=form, max_tokens=96).choices[0].message.content
        is_object(text)
        return str(text)

    def schema(self) -> str:
        return self._schema(SHORT)

    def schema_long(self) -> str:
        return self._schema(LONG)

    def responses_header(self) -> str:
        """The policy that the header names is the one that was asked for."""
        named = self._raw(max_tokens=1).headers["x-kv-policy"]
        check(named.split(":")[0] == self._policy.split(":")[0], f"says {named}")
        return str(named)


def ask(client: Any, policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By policy and kind: whether it is as it has to be, the text, and whether it is `full`'s."""
    from openai import OpenAIError

    found: dict[str, dict[str, Any]] = {}
    for policy in policies:
        found[policy] = {}
        for kind, asked in Suite(client, policy).kinds().items():
            began = time.monotonic()
            try:
                result: dict[str, Any] = {"passed": True, "text": asked()}
            except (Failed, OpenAIError) as error:
                result = {"passed": False, "why": str(error)}
            full = found.get("full", {}).get(kind, {}).get("text")
            if policy != "full" and full is not None and kind != "responses_header":
                result["as_full"] = result.get("text") == full
            result["seconds"] = round(time.monotonic() - began, 1)
            found[policy][kind] = result
            print(f"{policy:24} {kind:18} {result}"[:180], file=sys.stderr, flush=True)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.serving.client_suite")
    parser.add_argument("model", type=Path)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--output", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    from openai import OpenAI

    flags = [str(args.model), "--served-model-name", NAME, "--max-model-len", "2048"]
    flags += ["--kv-policy", "full", "--kv-layout"]
    flags += [served(policy) for policy in args.policies if policy != "full"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    command = (sys.executable, "-m", "vllm_kvx.cli")
    # Before it is asked: the commit may be another one afterwards.
    what = "Every kind of request that OpenAI's client makes, by policy, with full's beside it."
    line = command_line("benchmarks.serving.client_suite", argv)
    head = about(what, line, packages=("openai", "transformers"))
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(flags, Path(folder) / "log", cpu_environment(), 600, command) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", timeout=1200, max_retries=0) as client,
    ):
        found = ask(client, args.policies)
    failed = [f"{p}: {k}" for p, by in found.items() for k, r in by.items() if not r["passed"]]
    print(f"failed: {', '.join(failed) or 'none'}")
    if args.output:
        model = {"name": args.model.name, "failed": failed, "policies": found}
        write_json(args.output, {"about": head, "models": [model]})
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

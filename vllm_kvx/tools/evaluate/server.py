"""A running server that answers under several policies."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from vllm_kvx.config.measured import Measured
from vllm_kvx.config.settings import POLICY_KEY
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.cache_dtype import at_dtype
from vllm_kvx.policy.policy import KVPolicy, with_retrieval
from vllm_kvx.policy.spec import parse_policy, servable
from vllm_kvx.tools.evaluate.engine import Answered, Progress, Prompt, Refused
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.shares import Shares, shares_of

_TIMEOUT_S = 1800.0


class RunningServer:
    """``vllm serve`` with a policy, reached over HTTP; its layout has room for all of ours."""

    def __init__(
        self, url: str, policies: Mapping[Row, KVPolicy], concurrency: int, model_key: str
    ) -> None:
        """url: of the server, with or without ``/v1``. model_key: of the model it has to serve.

        Raises:
            ToolError: no such server answers, or it refuses one of the policies.
        """
        import httpx

        self._errors = (httpx.HTTPError, httpx.InvalidURL)
        self._client = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            timeout=_TIMEOUT_S,
            # vLLM's server closes what was idle for 5 s. A request that is on its way then is lost.
            limits=httpx.Limits(max_connections=concurrency, keepalive_expiry=2.5),
        )
        self._concurrency = concurrency
        self._requested = {row: servable(with_retrieval(p)) for row, p in policies.items()}
        self._model = self._get("/v1/models")["data"][0]["id"]
        status = self._get("/v1/kv_policy")
        self.num_layers = int(status["num_layers"])
        groups = status["layout"].get("groups", ())
        self.block_size = int(groups[0]["block_size"]) if groups else 16
        self._measured = Measured.of_status(status.get("measured_config", {}))
        if status.get("model_key") != model_key:
            raise ToolError(
                f"the server at {self._client.base_url} runs other weights ({self._model}) than "
                "MODEL has: name the model that it serves"
            )
        self._dtype = status.get("kv_cache_dtype")
        for row in policies:
            if at_dtype(row.cache_dtype):
                raise ToolError(
                    f"{row}: a server has one KV cache, for full too: leave --base-url out, and "
                    "an engine of each dtype is started here"
                )
            # Before hours of work.
            self._answer(row, Prompt([0], 1))

    def answers(self, row: Row, prompts: Sequence[Prompt], progress: Progress) -> list[Answered]:
        """Greedy answers under one row, `concurrency` prompts at a time.

        Raises:
            Refused: it takes one of the prompts not under this row.
            ToolError: it fails, or a prompt wants forced tokens, which HTTP cannot carry.
        """
        progress.begin(row, len(prompts))
        with ThreadPoolExecutor(self._concurrency) as pool:
            waiting = {pool.submit(self._answer, row, prompt): prompt for prompt in prompts}
            try:
                for answer in as_completed(waiting):
                    answer.result()
                    # A server does not say when an answer begins: it is all one step.
                    progress.step([len(waiting[answer].token_ids)], 0)
                    progress.finish(waiting[answer], 0)
            finally:
                # After an error those that wait are not asked.
                for answer in waiting:
                    answer.cancel()
        return [answer.result() for answer in waiting]

    def shares(self, row: Row, prompt_len: int, generated: int) -> Shares:
        """What the row keeps of such a prompt, with the layers that the server measured.

        generated: tokens of its answer.
        """
        policy, layers = self._policy(row), self.num_layers
        return shares_of(policy, prompt_len, self.block_size, layers, generated=generated)

    def resolved(self, row: Row) -> Row:
        """The row's policy with the layers that the server measured, and its KV cache dtype."""
        return Row(str(self._policy(row))).over(self._dtype)

    def _policy(self, row: Row) -> KVPolicy:
        return KVPolicy.of(map(self._measured.put_into, parse_policy(self._requested[row]).parts))

    def close(self) -> None:
        """Closes the connections to the server, which runs on."""
        self._client.close()

    def _answer(self, row: Row, prompt: Prompt) -> Answered:
        if prompt.forced:
            raise ToolError(
                "perplexity forces tokens, which a server does not take: leave --base-url out"
            )
        body = {
            "model": self._model,
            "prompt": list(prompt.token_ids),
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            # A model's generation_config must not change what greedy means.
            **{"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1},
            **{"presence_penalty": 0, "frequency_penalty": 0},
            "vllm_xargs": {POLICY_KEY: self._requested[row]},
        }
        said = self._said(row, "/v1/completions", body)
        tokens = said["usage"]["completion_tokens"]
        return Answered(said["choices"][0]["text"], float("nan"), tokens)

    def _said(self, row: Row, path: str, body: Mapping[str, Any]) -> Any:
        try:
            response = self._client.post(path, json=body)
        except self._errors as error:
            raise ToolError(f"{self._client.base_url}: {error}") from error
        if response.is_error:
            try:
                reason = response.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                reason = response.text[:300]
            # A 400 is about this prompt under this row; others say that no other fares better.
            kind = Refused if response.status_code == 400 else ToolError
            raise kind(f"the server refuses {row} ({response.status_code}): {reason}")
        return response.json()

    def _get(self, path: str) -> Any:
        try:
            response = self._client.get(path)
            response.raise_for_status()
            return response.json()
        except (*self._errors, ValueError) as error:
            raise ToolError(
                f"no server with a KV policy answers at {self._client.base_url} ({error}): start "
                "one by `vllm serve MODEL --kv-policy ...`, or leave --base-url out"
            ) from error


@contextmanager
def running_server(
    url: str, policies: Mapping[Row, KVPolicy], concurrency: int, model_key: str
) -> Iterator[RunningServer]:
    """The server while the block runs."""
    server = RunningServer(url, policies, concurrency, model_key)
    try:
        yield server
    finally:
        server.close()

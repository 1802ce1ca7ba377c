"""One engine of `benchmarks.engine.host_time`: real scheduler and runner, no device's work.

The engine runs in this process, on CPU, under Triton's interpreter. Kernels return at once, the
forward pass and the replay of a CUDA graph return zeros, and every answer is the same token. What
is left of a step is what the host does for it, and nothing that the host decides depends on values
that only the device knows. Steps are planned ahead, and decode steps replay FULL CUDA graphs, as
servers on GPUs do.
"""

import ctypes
import json
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common.names import served

BLOCK = 32  # What the CPU attention backend takes.
VOCAB = 512
LAYERS = 32
CHUNK = 8192
_DONT_NEED = 4  # Linux's MADV_DONTNEED.

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def set_environment() -> None:
    """For this process and its children, before vLLM is imported."""
    os.environ.update(
        KVX_CPU="1",
        TRITON_INTERPRET="1",
        KVX_RETRIEVAL_OPS="triton",  # The code of GPUs, in the place of CPUs' plain torch.
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
        OMP_NUM_THREADS="1",
    )
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


class Clock:
    """CPU time of this thread by step, in ns, and kernels launched.

    steps: of each real step, the parts' times and what was scheduled.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.launches = 0
        self._paused = 0
        self._pending: deque[dict[str, Any]] = deque()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs meanwhile counts nowhere."""
        begin = time.thread_time_ns()
        yield
        self._paused += time.thread_time_ns() - begin

    def around(self, call: Callable[..., Any]) -> Callable[..., tuple[Any, int]]:
        """`call`, with the time that it took."""

        def timed(*args: Any, **kwargs: Any) -> tuple[Any, int]:
            begin, paused = time.thread_time_ns(), self._paused
            result = call(*args, **kwargs)
            return result, time.thread_time_ns() - begin - (self._paused - paused)

        return timed

    def watch(self, scheduler: Any, worker: Any) -> None:
        """From now on every step is recorded."""
        schedule = self.around(scheduler.schedule)
        update = self.around(scheduler.update_from_output)
        execute = self.around(worker.execute_model)

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output, spent = schedule(*args, **kwargs)
            step = {"counts": dict(output.num_scheduled_tokens), "schedule": spent}
            step["new"] = [new.req_id for new in output.scheduled_new_reqs]
            self._pending.append(step)
            return output

        def executed(*args: Any, **kwargs: Any) -> Any:
            before = self.launches
            result, spent = execute(*args, **kwargs)
            self._pending[-1].update(worker=spent, launches=self.launches - before)
            return result

        def updated(*args: Any, **kwargs: Any) -> Any:
            result, spent = update(*args, **kwargs)
            step = self._pending.popleft()
            step["update"] = spent
            self.steps.append(step)
            return result

        scheduler.schedule, scheduler.update_from_output = scheduled, updated
        worker.execute_model = executed


def leave_out_the_device(clock: Clock) -> None:
    """Kernels, forward passes and CUDA graphs are not run; call it before the engine is made."""
    import torch
    from triton.runtime.interpreter import InterpretedFunction
    from vllm.config.compilation import CUDAGraphMode
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

    from vllm_kvx.models.decoder import SegmentedModel
    from vllm_kvx.worker import model_state

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        clock.launches += 1

    def index_select(self: Any, dim: int, index: Any) -> Any:
        # A copy of whole block tables, which a GPU makes by itself.
        clock.launches += 1
        shape = list(self.shape)
        shape[dim] = len(index)
        return self.new_empty(shape)

    def index_copy_(self: Any, dim: int, index: Any, source: Any) -> Any:
        # Hidden states into pages of the cache, likewise.
        clock.launches += 1
        return self

    hidden_size: Any = CONFIG["hidden_size"]

    def zeros(count: int) -> torch.Tensor:
        with clock.paused():
            return torch.zeros((count, hidden_size), dtype=torch.float32)

    def forward(self: Any, input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        return zeros(positions.shape[0])

    dispatch = ModelCudaGraphManager.dispatch

    def dispatched(self: Any, reqs: int, tokens: int, uniform: Any, *args: Any, **kw: Any) -> Any:
        if uniform == 1:
            return BatchExecutionDescriptor(CUDAGraphMode.FULL, tokens, reqs, 1)
        return dispatch(self, reqs, tokens, uniform, *args, **kw)

    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def ahead(cls: type, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    # Where all is on CPU the host would map slots.
    model_state.map_slots = partial(model_state.map_slots, on_host=False)
    InterpretedFunction.run = run
    # Classes whose methods are replaced.
    tensors: Any = torch.Tensor
    graphs: Any = ModelCudaGraphManager
    platform: Any = CpuPlatform
    models: tuple[Any, ...] = (LlamaForCausalLM, SegmentedModel)
    tensors.index_select, tensors.index_copy_ = index_select, index_copy_
    for model in models:
        model.forward = forward
    graphs.dispatch = dispatched
    graphs.run_fullgraph = lambda self, desc: zeros(desc.num_tokens)
    platform.check_and_update_config = classmethod(ahead)


class Engine:
    """One engine and its load: requests that decode, and long prompts that come in beside them."""

    def __init__(
        self, folder: Path, policy: str | None, own: str | None, most: int, kv_bytes: int
    ) -> None:
        """policy: None is stock vLLM. own: that requests name themselves, if any does.

        most: requests that run at once.
        """
        self._own = own
        set_environment()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        self.clock = Clock()
        leave_out_the_device(self.clock)
        from vllm import LLM

        self._llm = LLM(
            model=str(folder),
            load_format="dummy",
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=CONFIG["max_position_embeddings"],
            max_num_seqs=most + 8,
            max_num_batched_tokens=CHUNK,
            kv_cache_memory_bytes=kv_bytes,
            disable_log_stats=False,
            additional_config={} if policy is None else {"kv_policy": served(policy)},
            seed=0,
        )
        core: Any = self._llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        worker = core.model_executor.driver_worker.worker
        self.scheduler, self._runner = core.scheduler, worker.model_runner
        self._answer_without_sampling()
        for cache in self._runner.kv_caches:
            _give_back(cache)
        self.clock.watch(self.scheduler, worker)
        self._count, self._running = 0, list[str]()

    def _answer_without_sampling(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        runner = self._runner

        def sample_tokens(grammar_output: Any) -> Any:
            state, runner.execute_model_state = runner.execute_model_state, None
            batch = state.input_batch
            ends = batch.num_computed_tokens_np + batch.num_scheduled_tokens[: batch.num_reqs]
            return ModelRunnerOutput(
                req_ids=batch.req_ids,
                req_id_to_index={name: i for i, name in enumerate(batch.req_ids)},
                sampled_token_ids=[[7] if done else [] for done in ends >= batch.prefill_len_np],
            )

        runner.sample_tokens = sample_tokens

    def add(self, tokens: list[int], answer: int) -> str:
        """Gives the engine a request; its id."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self._count += 1
        name = f"request-{self._count}"
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=answer,
            extra_args=None if self._own is None else {"kv_policy": served(self._own)},
        )
        self._llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), params)
        return name

    def prompt(self, length: int, seed: int) -> list[int]:
        import numpy as np

        # All begin with the same token, as prompts do.
        return [1, *np.random.default_rng(seed).integers(3, VOCAB, length - 1).tolist()]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._llm.llm_engine.step()

    def _recorded(self) -> list[dict[str, Any]]:
        steps, self.clock.steps = self.clock.steps, []
        return steps

    # What the parent asks for.

    def run(self, requests: int, length: int) -> None:
        """So many requests decode from now on."""
        while len(self._running) < requests:
            # Lengths differ, so that blocks do not end in all requests at once.
            prompt = self.prompt(length + len(self._running) % BLOCK, len(self._running))
            self._running.append(self.add(prompt, 1 << 14))
        while any(not self._request(name).num_output_tokens for name in self._running):
            self.step()
        self.step(4)

    def _request(self, name: str) -> Any:
        return next(r for key, r in self.scheduler.requests.items() if key.startswith(name))

    def decode(self, steps: int) -> list[dict[str, Any]]:
        """Steps in which every request decodes."""
        self._recorded()
        self.step(steps)
        return [
            _figures(s) for s in self._recorded() if sum(s["counts"].values()) == len(s["counts"])
        ]

    def chunks(self, length: int, seed: int) -> list[dict[str, Any]]:
        """Steps in which a prompt comes in beside them: its first one, those between, its last."""
        self._recorded()
        self.add(self.prompt(length, seed), 1)
        found, done = list[dict[str, Any]](), 0
        while done < length:
            self.step()
            for step in self._recorded():
                long = max(step["counts"].values())
                if long == 1:
                    continue
                done += long
                kind = "last" if done >= length else "first" if step["new"] else "between"
                found.append({**_figures(step), "kind": kind})
        self.step(3)
        return found

    def waits(self, length: int, seed: int, steps: int) -> list[dict[str, Any]]:
        """Decode steps beside a prompt that waits for blocks, and begins with a cached one."""
        pool = self.scheduler.kv_cache_manager.block_pool
        groups = len(self.scheduler.kv_cache_manager.coordinator.single_type_managers)
        room = groups * (length // BLOCK + 4 * len(self._running))
        # Cached blocks were freed last, and are taken last.
        taken = pool.get_new_blocks(max(pool.get_num_free_blocks() - room, 0))
        prompt = self.prompt(length, seed) + self.prompt(length // 2, seed + 1)
        name = self.add(prompt, 1)
        self.step(3)
        self._recorded()
        self.step(steps)
        found = self._recorded()
        waiting = len(self.scheduler.waiting)
        self._llm.llm_engine.abort_request([name])
        pool.free_blocks(taken)
        self.step(3)
        if not waiting:
            raise RuntimeError("the prompt did not wait")
        return [_figures(step) for step in found]


def _figures(step: dict[str, Any]) -> dict[str, Any]:
    """Times in us, and launches."""
    parts = {key: step[key] / 1e3 for key in ("schedule", "update", "worker")}
    return {**parts, "launches": step["launches"]}


def _give_back(tensor: Any) -> None:
    """Lets the system have the memory of a KV cache, which nobody reads or writes here."""
    page = os.sysconf("SC_PAGE_SIZE")
    storage = tensor.untyped_storage()
    begin = -(-storage.data_ptr() // page) * page
    size = (storage.data_ptr() + storage.nbytes() - begin) // page * page
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _DONT_NEED)


def serve(
    pipe: Connection,
    folder: str,
    policy: str | None,
    own: str | None,
    most: int,
    kv_bytes: int,
) -> None:
    """Makes the engine and does what the parent asks: (method, arguments), until None."""
    try:
        engine = Engine(Path(folder), policy, own, most, kv_bytes)
        pipe.send(("ok", None))
        while (asked := pipe.recv()) is not None:
            pipe.send(("ok", getattr(engine, asked[0])(*asked[1])))
    except Exception:
        pipe.send(("error", traceback.format_exc()))

"""Every policy of a server runs before the server is ready: no request waits for a compiler."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from vllm.distributed.parallel_state import get_dp_group
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

from vllm_kvx.config.settings import POLICY_KEY, KVSettings
from vllm_kvx.ops.radix import always_shared
from vllm_kvx.policy.policy import KVPolicy

logger = init_logger("vllm.kvx.worker")

# Tokens of the prompts, where a step takes as many: more than windows and floors that are in use,
# so that something is selected and given up.
PROMPT_TOKENS = 4096
# Below this, windows fill a prompt and nothing would be selected.
_FEWEST = 64
# Up to so many rows experts run on each number of them.
_ALL_BELOW = 96


def warm_up(
    runner: Any,
    execute: Callable[[Any], Any],
    sample: Callable[[Any], Any],
    settings: KVSettings,
) -> list[KVPolicy]:
    """Runs a prompt, and a decode beside it, under each of the server's policies but `full`.

    And under `full` where the model drafts for itself, which it does in these steps.

    Triton compiles a kernel at its first launch, which takes up to a second each. vLLM's own
    warm-up has prompts of a few tokens, shorter than any window. Run before vLLM begins to watch
    for kernels that are compiled while serving, after its KV cache and graphs are there.

    runner: vLLM's GPUModelRunner. execute, sample: the worker's, through which steps go.
    Returns the policies that ran: those for which a step, the KV cache and the stash have room.
    """
    if runner.model_config.is_moe and settings.layout.propagates:
        _run_experts(runner)
    with _same_room(runner):
        return _warm_up(runner, execute, sample, settings)


def _warm_up(
    runner: Any,
    execute: Callable[[Any], Any],
    sample: Callable[[Any], Any],
    settings: KVSettings,
) -> list[KVPolicy]:
    # vLLM's steps give every KV group blocks for every token.
    state, ran = runner.model_state, []
    checked, state.checks_blocks = state.checks_blocks, False
    # Under `full` nothing has to be compiled but what a drafter reads by.
    drafts = settings.layout.own_drafts
    policies = dict.fromkeys(p for p in settings.policies if drafts or not p.is_full)
    took: dict[str, float] = {}
    for number, policy in enumerate(policies):
        began, tokens = time.monotonic(), _tokens(runner, settings)
        while tokens >= _FEWEST and not run_mixed_prefill_decode_warmup(
            runner,
            _under(policy, execute),
            sample,
            tokens,
            req_id_prefix=f"_kvx_warm_up_{number}",
        ):
            # vLLM says so in the log: the KV cache has too few blocks.
            tokens //= 2
        if tokens >= _FEWEST:
            ran.append(policy)
            # And once with the kernels that find what stays of long prompts.
            again = f"_kvx_warm_up_long_{number}"
            with always_shared():
                run_mixed_prefill_decode_warmup(
                    runner, _under(policy, execute), sample, tokens, req_id_prefix=again
                )
            took[str(policy)] = time.monotonic() - began
    state.checks_blocks = checked
    if took:
        # Seconds where a kernel was not compiled ahead and Triton's cache is empty.
        each = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took.items())
        logger.info("Policies ran once, with all their kernels: %s.", each)
    if len(ran) < len(policies):
        missing = ", ".join(str(policy) for policy in policies if policy not in ran)
        logger.warning(
            "No room to run %s before the first request, which will wait for its kernels.", missing
        )
    return ran


def _run_experts(runner: Any) -> None:
    """Runs the layers on odd and even numbers of rows, of every size that a step may have.

    Where a policy propagates, as many rows as it leaves pass the upper layers. They are not padded
    to a size whose graph was captured, as the rows of a whole step are.
    """
    if runner.parallel_config.pipeline_parallel_size > 1 or runner.lora_config is not None:
        return  # These take more than tokens and positions.
    most, began = runner.max_num_tokens, time.monotonic()
    counts = expert_rows(most, _expert_kinds(runner.model))
    model = runner.model_config
    rows_of_positions = (model.mrope_num_dims,) if model.uses_mrope else ()
    ids = torch.zeros(most, dtype=torch.int32, device=runner.device)
    positions = torch.zeros((*rows_of_positions, most), dtype=torch.int64, device=runner.device)
    for rows in counts:
        # Without metadata attention does nothing and writes nothing.
        with torch.inference_mode(), set_forward_context(None, runner.vllm_config, num_tokens=rows):
            runner.model(
                input_ids=ids[:rows],
                positions=positions[..., :rows],
                inputs_embeds=None,
                intermediate_tensors=None,
            )
    took = time.monotonic() - began
    logger.info("Experts ran on up to %d rows, in %.1f s.", counts[-1], took)


def _expert_kinds(model: torch.nn.Module) -> set[tuple[int, int]]:
    """Experts, of all ranks and of this one, and how many of them a row takes, in each layer."""
    layers = [each for each in model.modules() if isinstance(each, RoutedExperts)]
    found = {
        (experts, layer.top_k)
        for layer in layers
        for experts in (layer.global_num_experts, layer.local_num_experts)
    }
    if not found:
        logger.warning(
            "This model's experts are none that vLLM usually runs: some of their kernels may be "
            "compiled while requests are served."
        )
    return found or {(1, 1)}


def expert_rows(most: int, kinds: Collection[tuple[int, int]]) -> list[int]:
    """Numbers of rows, at most `most`, for which experts' kernels may differ.

    vLLM's tiles change with the rows, nowhere twice between a power of two, half as many more, and
    the next power. Triton compiles a kernel anew where one of its sizes is a multiple of 16 and was
    none before: the pairs of rows and experts, and these with the room that tiles of 16 rows and
    more leave for every expert. Below 96 rows both change with nearly every row.

    kinds: numbers of experts, and how many of them a row takes.
    """
    aligned: dict[tuple[bool, ...], int] = {}
    for rows in range(16):
        pairs = [(rows * taken, experts) for experts, taken in sorted(kinds)]
        key = tuple(size % 16 == 0 for each, experts in pairs for size in (each, each - experts))
        aligned.setdefault(key, rows)
    powers = [2**power for power in range(6, most.bit_length())]
    limits = [limit for size in powers for limit in (size, size * 3 // 2) if limit >= _ALL_BELOW]
    counts = {limit + (rows or 16) for limit in limits for rows in aligned.values()}
    # Tiles may change between the last limit and the most.
    counts |= {most - (most - rows) % 16 for rows in aligned.values()}
    return sorted({count for count in (*range(1, _ALL_BELOW + 1), *counts) if count <= most})


@contextmanager
def _same_room(runner: Any) -> Iterator[None]:
    """Inside, each data-parallel rank of experts goes by the fewest blocks that one of them has.

    Experts run in lockstep over these ranks. If one had no room for a prompt and passed it over,
    the others would wait for it. How many tokens a step has may differ, and is the same here.
    """
    cache = runner.kv_cache_config
    own = cache.num_blocks
    if runner.parallel_config.data_parallel_size > 1 and runner.model_config.is_moe:
        fewest = torch.tensor([own])
        distributed.all_reduce(fewest, op=distributed.ReduceOp.MIN, group=get_dp_group().cpu_group)
        cache.num_blocks = int(fewest)
    try:
        yield
    finally:
        cache.num_blocks = own


def _tokens(runner: Any, settings: KVSettings) -> int:
    """Of a step with a whole prompt and a decode."""
    # vLLM's prompt is 0, 1, 2 and so on.
    vocabulary = runner.model_config.get_vocab_size()
    windows = settings.layout.windows
    wanted = PROMPT_TOKENS + (0 if windows is None else windows.reach)
    room = runner.max_model_len - settings.layout.lookahead
    longest = min(wanted, runner.max_num_tokens, room, vocabulary)
    if settings.layout.stash:
        longest = min(longest, settings.stash_tokens)
    return int(longest)


def _under(policy: KVPolicy, execute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`execute` for steps whose new requests name the policy."""

    def run(scheduler_output: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            request.sampling_params.extra_args = {POLICY_KEY: str(policy)}
        return execute(scheduler_output)

    return run

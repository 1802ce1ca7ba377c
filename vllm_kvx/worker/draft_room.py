"""Room for the tokens that a draft model runs beside those of a step."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def widen_compiled_range(vllm_config: "VllmConfig") -> None:
    """Lets a compiled draft model run the largest step of the scheduler, and its own tokens.

    A draft model runs a step's tokens and one more of each request. vLLM compiles it, as all
    models, for at most `max_num_batched_tokens`, and a full step ends the server with "Shape ...
    out of considered ranges". Its buffers have the room, so the last range gets it too.

    Called once both models are loaded and before one runs: to load the draft model vLLM copies the
    configuration, which sets the ranges again that both of them share.

    Where no CUDA graphs are captured, vLLM runs the model once at the end of the range, for which
    the main model has no room, and nothing is changed.
    """
    from vllm.config import CUDAGraphMode

    drafter, compilation = vllm_config.speculative_config, vllm_config.compilation_config
    if drafter is None or drafter.method != "draft_model":
        return
    ends = compilation.compile_ranges_endpoints
    if not ends or compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return
    scheduler = vllm_config.scheduler_config
    if ends[-1] == scheduler.max_num_batched_tokens:
        ends[-1] += drafter.max_num_new_slots_for_drafting * scheduler.max_num_seqs

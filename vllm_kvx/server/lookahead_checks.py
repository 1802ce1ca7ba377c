"""What a server with `lookahead` refuses at start, and what to change: one row each.

Tokens are drafted behind a prompt within the step that ends it, in passes of the worker's own.
"""

from vllm_kvx.server.further_passes import with_further_passes
from vllm_kvx.server.start_refusal import DRAFTS, Refusal

_WITHOUT = "leave out lookahead= of the KV policy and kv_layout"

# Where tokens are drafted behind prompts (``Layout.lookahead``).
WITH_LOOKAHEAD: tuple[Refusal, ...] = (
    Refusal(
        lambda c: c.speculative_config,
        "tokens that lookahead= drafts were never tried beside speculative decoding: drop "
        f"--speculative-config, or {_WITHOUT}",
        DRAFTS,
    ),
    *with_further_passes("lookahead=", _WITHOUT),
)

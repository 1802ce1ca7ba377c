"""What `vllm serve` does where a server of ours refuses to start."""

import os
import sys
from collections.abc import Callable
from typing import Any

from vllm_kvx.errors import REFUSAL


def serve_command(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """`vllm serve` that ends with a refusal's message and code 2, as it does for a bad flag.

    Other errors are vLLM's to show. With VLLM_LOGGING_LEVEL=DEBUG the traceback comes too.
    """

    def cmd(args: Any) -> None:
        try:
            original(args)
        except (ValueError, RuntimeError) as error:
            if not getattr(error, REFUSAL, False):
                raise
            if os.environ.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG":
                raise
            # Not into the log, whose level may hide it.
            print(f"vllm serve: error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None

    return cmd

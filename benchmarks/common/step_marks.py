"""What a benchmark adds to vLLM's workers: marks in the trace of their profiler."""

from typing import Any

from benchmarks.common.decode_steps import mark

# vLLM finds the class by this name, in each worker (`worker_extension_cls`).
EXTENSION = "benchmarks.common.step_marks.StepMarks"


class StepMarks:
    """Methods that each worker has beside its own."""

    def mark_step_parts(self: Any) -> None:
        """From now on a profile shows the calls that a decode step consists of, as host parts.

        Not earlier than profiles need it: a mark takes the host a microsecond or two.
        """
        for name in ("execute_model", "sample_tokens"):
            setattr(self.model_runner, name, mark(name, getattr(self.model_runner, name)))

"""What a benchmark adds to vLLM's workers: marks in the trace of their profiler."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from benchmarks.common.decode_steps import mark

# vLLM finds the class by this name, in each worker (`worker_extension_cls`).
EXTENSION = "benchmarks.common.step_marks.StepMarks"


class StepMarks:
    """Methods that each worker has beside its own."""

    def mark_step_parts(self: Any) -> None:
        """From now on a profile shows the calls that a decode step consists of, as host parts.

        Not while steps are timed without one: a mark takes the host a microsecond or two.
        """
        runner = self.model_runner
        self.step_marks = ExitStack()
        for name in ("execute_model", "sample_tokens"):
            marked = mark(name, getattr(runner, name))
            self.step_marks.enter_context(patch.object(runner, name, marked))

    def unmark_step_parts(self: Any) -> None:
        """Undoes `mark_step_parts`."""
        self.step_marks.close()

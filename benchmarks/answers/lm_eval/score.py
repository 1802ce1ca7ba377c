"""The score of lm-eval's answers: that of `vllm-kvx evaluate`. Needs neither torch nor vLLM."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_kvx.tools.tasks.base import Sample
from vllm_kvx.tools.tasks.table import TASKS


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm-eval's hook: the share of one question that its one answer has right, 0 to 1.

    doc: a row of the data set that ``write`` wrote.
    """
    sample = Sample(doc["prompt"], tuple(doc["references"]), begins=doc["begins"])
    return {"score": TASKS[doc["task"]].score(results[0], sample)}

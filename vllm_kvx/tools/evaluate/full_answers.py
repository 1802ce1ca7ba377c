"""Whether `full` answers enough of a run's questions for a policy's share of them to say anything.

Its answers come first, so that a run that can show nothing ends before the policies are asked.
"""

from collections.abc import Sequence
from pathlib import Path

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate import report
from vllm_kvx.tools.evaluate.intervals import least_right
from vllm_kvx.tools.evaluate.summary import PERPLEXITY, Summary


def says(summary: Summary) -> str:
    """What the yardstick has right; empty where nothing is right or wrong."""
    cell = summary.cell(summary.yardstick)
    if cell is None:
        return ""
    score = cell.score
    return (
        f"{summary.yardstick}: {100 * score.value:.1f}% "
        f"[{100 * score.low:.0f}-{100 * score.high:.0f}] of {cell.count} answers right"
    )


def are_too_few(scores: Sequence[float]) -> bool:
    """Whether `full` has too few of its answers right, where that is not for want of prompts.

    scores: of its answers, 0 to 1. None right is too few of any number. Fewer than `least_right`
    are too few of at least as many; a run with fewer prompts was asked for as it is.
    """
    right = sum(scores)
    return right == 0 or right < least_right() <= len(scores)


def check(summary: Summary, directory: Path, keep_going: bool, save: bool) -> None:
    """Prints what the yardstick has right, and raises ToolError where no policy can be compared.

    summary: of the yardstick's answers alone. directory: where they are kept. keep_going: whether
    to go on all the same; a run that asks for perplexity does, for which nothing has to be right.
    save: whether results were to be saved.
    """
    scores = [
        answer.score
        for question, answer in summary.answers(summary.yardstick).items()
        if question.task != PERPLEXITY
    ]
    if not scores:
        return
    print(says(summary), flush=True)
    if not are_too_few(scores):
        return
    wrong = (
        f"{summary.yardstick} has {sum(scores):.3g} of {len(scores)} answers right, and a policy "
        f"that keeps all of so few cannot be told from one that keeps none ({least_right()} are "
        "the least)"
    )
    if keep_going or PERPLEXITY in summary.tasks:
        print(f"{wrong}: shares of full will say nothing.", flush=True)
        return
    print(f"\n{report.task_table(summary)}\n", flush=True)
    more = "more --samples, " if sum(scores) else ""
    raise ToolError(
        f"{wrong}, so no policy was asked{' and nothing is saved' if save else ''}: use --tasks of "
        f"which it answers more, shorter --lengths, {more}or a model that follows instructions "
        "better; --keep-going asks the policies all the same. Its answers are kept in "
        f"{directory}"
    )

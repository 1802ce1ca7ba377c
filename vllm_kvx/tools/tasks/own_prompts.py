"""A user's own prompts with their answers, from a file.

A line is a JSON object with `prompt`, what the user says, and `answer`, a text that a right answer
contains, or `answers`, several of which any one will do.
"""

from functools import cached_property
from pathlib import Path

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tasks.base import FixedTask, Sample
from vllm_kvx.tools.tasks.jsonl import objects, text_of, texts_of
from vllm_kvx.tools.tasks.scoring import share_found

# The longest answer: what a model says around the text that is looked for, and that text, of which
# a token has at least a character.
_AROUND = 48


class OwnPrompts(FixedTask):
    """The prompts of a file; each is as long as it is, and goes through the chat template.

    Raises:
        ToolError: the file cannot be read, or a line has no prompt or no answer; it is named.
    """

    name = "own_prompts"
    about = "a file of prompts with answers"
    is_short = True
    may_be_cut = False

    def __init__(self, path: Path) -> None:
        self.path = path
        references = [text for sample in self.samples() for text in sample.references]
        self.max_tokens = _AROUND + max(map(len, references))

    def samples(self) -> tuple[Sample, ...]:
        return self._samples

    @cached_property
    def _samples(self) -> tuple[Sample, ...]:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise ToolError(f"cannot read prompts from {self.path}: {error.strerror}") from error
        if self.path.suffix == ".txt":
            raise ToolError(f"{self.path}: texts have no answers: {_WANTED}")
        found = []
        for fields, where in objects(data, str(self.path)):
            text = text_of(fields, "prompt", where)
            if ("answer" in fields) == ("answers" in fields):
                has = 'both "answer" and' if "answer" in fields else 'neither "answer" nor'
                raise ToolError(f'{where}: it has {has} "answers": {_WANTED}')
            if "answer" in fields:
                references: tuple[str, ...] = (text_of(fields, "answer", where),)
            else:
                references = texts_of(fields, "answers", where)
            if not all(each.strip() for each in references):
                raise ToolError(f"{where}: an answer is empty, and stands in every text")
            found.append(Sample(text, references))
        if not found:
            raise ToolError(f"{self.path} holds no prompts")
        return tuple(found)

    def score(self, answer: str, sample: Sample) -> float:
        """1 if the answer contains any of the references, whatever their case; else 0."""
        return max(share_found(answer, [reference]) for reference in sample.references)


_WANTED = 'a line is {"prompt": "...", "answer": "..."}, or has "answers", any of which is right'

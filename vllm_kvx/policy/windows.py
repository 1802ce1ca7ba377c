"""Layers that slide over a window, beside those with full attention."""

from dataclasses import dataclass, replace

from vllm_kvx.policy.axes import Selection


@dataclass(frozen=True)
class Windows:
    """The layers of a model that slide.

    layers: sorted, counted from 0. reach: how many tokens before the next one the longest window
        sees, at least one fewer than its length.
    """

    layers: tuple[int, ...]
    reach: int

    def widened(self, selection: Selection, prompt_len: int) -> Selection | None:
        """`selection` with all tokens that layers which slide read once the prompt is in.

        A window is one of positions. So that it holds what it shows, the last tokens of the prompt
        go on, as many as it reaches, beside those that the score chooses before them. None if that
        is the whole prompt.
        """
        if self.layers[-1] < selection.resumes_at:
            return selection
        chosen = selection.count - selection.last
        widened = replace(selection, reach=self.reach)
        count = chosen + widened.last
        return None if count >= prompt_len else replace(widened, count=count)

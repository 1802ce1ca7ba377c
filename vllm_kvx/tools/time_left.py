"""How long the rest of some work will take, in the lines that say how far it is."""

import time
from collections.abc import Callable, Sequence

from vllm_kvx.records.layers import TIME_LEFT


def duration(seconds: float) -> str:
    """A time left, as exact as an estimate can be: `40 s`, `12 min`, `2 h 10 min`."""
    if seconds < 99.5:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min"


class Left:
    """Says how long the rest of some work takes, by what its parts took so far."""

    def __init__(self, sizes: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        """sizes: of the parts, such as the tokens of prompts; as long as they are, they take."""
        self._sizes, self._clock, self._began = sizes, clock, clock()

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]]) -> "Left":
        """For prompts of token ids that are measured one after the other."""
        return cls([len(prompt) for prompt in prompts])

    def after(self, done: float) -> str:
        """`, about 40 s left of these`, after so many parts.

        It is empty before anything is done, and after all is. done: 2.5 are the first two parts
        and half of the third.
        """
        whole = int(done)
        size = sum(self._sizes[:whole]) + (done - whole) * sum(self._sizes[whole : whole + 1])
        if not 0 < size < sum(self._sizes):
            return ""
        seconds = (self._clock() - self._began) * (sum(self._sizes) / size - 1)
        return f"{TIME_LEFT} {duration(seconds)} left of these"

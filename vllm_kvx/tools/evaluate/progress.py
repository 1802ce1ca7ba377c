"""How far a run's answers are, and how long the rest will take, by tokens."""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from vllm_kvx.tools.evaluate.engine import Prompt
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.time_left import duration

# Seconds between two looks at the bar, on a terminal and in a file.
_EVERY_S, _EVERY_S_IN_A_FILE = 0.2, 30.0
_READ, _WRITE = "read", "write"
_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} answers [{elapsed}{postfix}]"


class Pace:
    """Seconds a token: of prompts that are read, and of answers that are written."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._tokens: dict[str, int] = defaultdict(int)

    def add(self, what: str, seconds: float, tokens: int) -> None:
        """So many tokens took so long."""
        self._seconds[what] += seconds
        self._tokens[what] += tokens

    def of(self, what: str) -> float | None:
        """Seconds a token; None where nothing is known."""
        return self._seconds[what] / self._tokens[what] if self._tokens[what] else None


class TimeLeft:
    """Estimates the seconds until all answers are there.

    Reading prompts and writing answers are paced apart, and each row by its own pace as soon as it
    has one. Answers are taken to be as long as those of the same limit were, and before there is
    one as long as they may be; engines that are yet to start to take as long as those that did.
    """

    def __init__(
        self, rows: Mapping[Row, Sequence[Prompt]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """rows: what each is yet to be asked."""
        self._clock = clock
        # Tokens of prompts that no answer has begun to, and answers without an end by their limit.
        self._unread = {row: sum(len(p.token_ids) for p in asked) for row, asked in rows.items()}
        self._open = {row: Counter(map(longest, asked)) for row, asked in rows.items()}
        self._paces: dict[Row, Pace] = defaultdict(Pace)
        self._of_all = Pace()
        self._lengths: dict[int, list[int]] = defaultdict(list)
        self._starts: list[float] = []
        self.starts_left = 0
        # The row that answers, its prompts that are not read, and its tokens without an end.
        self._row: Row | None = None
        self._coming, self._written, self._since = 0, 0, clock()

    def started(self, seconds: float) -> None:
        """An engine took so long to start."""
        self._starts.append(seconds)
        self.starts_left = max(self.starts_left - 1, 0)

    def begin(self, row: Row, count: int) -> None:
        """The engine is given so many prompts of a row."""
        self._row, self._coming, self._written = row, count, 0
        self._since = self._clock()

    def step(self, read: Sequence[int], written: int) -> None:
        """A step is done: answers began to prompts of so many tokens, and so many were written."""
        assert self._row is not None
        now = self._clock()
        # While prompts come in, they are what a step's time is spent on.
        what, tokens = (_READ, sum(read)) if self._coming else (_WRITE, written)
        for pace in (self._paces[self._row], self._of_all):
            pace.add(what, now - self._since, tokens)
        self._since = now
        self._coming -= len(read)
        self._written += written
        self._unread[self._row] -= sum(read)

    def finish(self, prompt: Prompt, tokens: int) -> None:
        """An answer has ended after so many tokens."""
        assert self._row is not None
        self._open[self._row][longest(prompt)] -= 1
        self._lengths[longest(prompt)].append(tokens)
        self._written = max(self._written - tokens, 0)

    def drop(self, rows: Sequence[Row]) -> int:
        """Forgets what was to be asked of these rows; how many answers that is."""
        for row in rows:
            del self._unread[row]
        return sum(self._open.pop(row).total() for row in rows)

    @property
    def seconds(self) -> float | None:
        """The estimate; None while the pace of something that is left is not known."""
        total = 0.0
        for row, unread in self._unread.items():
            unwritten = sum(count * self._length(most) for most, count in self._open[row].items())
            if row == self._row:
                unwritten = max(unwritten - self._written, 0)
            for what, tokens in ((_READ, unread), (_WRITE, unwritten)):
                if not tokens:
                    continue
                pace = self._paces[row].of(what) or self._of_all.of(what)
                if pace is None:
                    return None
                total += pace * tokens
        if self.starts_left and not self._starts:
            return None
        return total + self.starts_left * sum(self._starts) / max(len(self._starts), 1)

    def _length(self, most: int) -> float:
        known = self._lengths[most]
        return sum(known) / len(known) if known else float(most)


def longest(prompt: Prompt) -> int:
    """Tokens that an answer has at most."""
    return len(prompt.forced) or prompt.max_tokens


class AnswersBar:
    """The bar of a run's answers, on stderr; engines tell it of every step."""

    def __init__(self, rows: Mapping[Row, Sequence[Prompt]]) -> None:
        """rows: what each is yet to be asked."""
        self._left = TimeLeft(rows)
        self._every = _EVERY_S if sys.stderr.isatty() else _EVERY_S_IN_A_FILE
        self._shown = 0.0
        self._bar = tqdm(total=sum(map(len, rows.values())), dynamic_ncols=True, bar_format=_FORMAT)

    @contextmanager
    def starting(self, rows: Sequence[Row], engines: int, says: Sequence[str]) -> Iterator[None]:
        """Within, an engine for these rows starts, the first of so many that are left.

        says: lines to show before it does.
        """
        self._left.starts_left = engines
        for line in says:
            tqdm.write(line, file=sys.stderr)
        self._show(f"starting an engine for {', '.join(map(str, rows))}")
        begun = time.monotonic()
        yield
        self._left.started(time.monotonic() - begun)

    def begin(self, row: Row, count: int) -> None:
        """The engine is given so many prompts of a row."""
        self._left.begin(row, count)
        self._show(str(row))

    def step(self, read: Sequence[int], written: int) -> None:
        """Notes that an engine's step is done; see ``TimeLeft.step``."""
        self._left.step(read, written)
        self._show()

    def finish(self, prompt: Prompt, tokens: int) -> None:
        """Notes that an answer has ended after so many tokens, and moves the bar by one."""
        self._left.finish(prompt, tokens)
        self._bar.n += 1
        self._show()

    def drop(self, rows: Sequence[Row]) -> None:
        """These rows are not asked: their engine did not start."""
        self._bar.total -= self._left.drop(rows)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()

    def clear(self) -> None:
        """Makes room for a line on the terminal; the bar comes back with the next step."""
        self._bar.clear()

    def _show(self, what: str = "") -> None:
        now = time.monotonic()
        if what:
            self._bar.set_description_str(what, refresh=False)
        elif now - self._shown < self._every and self._bar.n < self._bar.total:
            return
        self._shown = now
        seconds = self._left.seconds
        left = "" if not seconds else f"about {duration(seconds)} left"
        self._bar.set_postfix_str(left, refresh=False)
        self._bar.refresh()

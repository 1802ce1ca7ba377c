"""The process in which the checks run, and how it reports them."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_kvx.tools.doctor.findings import Context, Finding, Request, Section, note, problem, reason
from vllm_kvx.tools.doctor.sections import SECTIONS

# Where what we call logs; what servers log at start is told by sections themselves.
_LOGGERS = ("calibration", "evaluation", "recommendation", "cache_folder")


def main(pipe: str, first: str, request: str, state: str) -> None:
    """Runs the sections from the one of index `first` on, and writes JSON lines to `pipe`.

    state: of the context, as the process before left it.
    """
    given = json.loads(request)
    given |= {
        name: tuple(given[name]) for name in ("layout", "serve_args") if given[name] is not None
    }
    context = Context.of(Request(**given), json.loads(state))
    # Nothing is downloaded, and no hub is waited for.
    os.environ["HF_HUB_OFFLINE"] = "1"
    with os.fdopen(int(pipe), "w") as out:
        for section in SECTIONS[int(first) :]:
            for finding in findings(section, context):
                _write(out, {"finding": finding})
            _write(out, {"done": section.name, "state": context.state()})
        # Libraries that hang or crash when the process ends must not spoil the answer.
        out.flush()
        os._exit(0)


def findings(section: Section, context: Context) -> Iterator[Finding]:
    """What `section` finds; that it cannot be done is a finding too."""
    lacks = [name for name in section.needs if name in context.missing]
    if lacks:
        yield note(f"not checked without {' and '.join(lacks)}: {context.missing[lacks[0]]}")
        return
    with _warnings_of_ours() as warned:
        try:
            yield from section.run(context)
        except (Exception, SystemExit) as error:  # What a broken installation raises, nobody knows.
            yield problem(f"cannot be checked: {reason(error)}")
        yield from (note(line) for line in dict.fromkeys(warned))


@contextmanager
def _warnings_of_ours() -> Iterator[list[str]]:
    """Collects what our code warns of meanwhile, such as records that are damaged."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    loggers = [logging.getLogger(f"vllm.kvx.{name}") for name in _LOGGERS]
    handler = Collector(logging.WARNING)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _write(out: Any, message: dict[str, Any]) -> None:
    out.write(json.dumps(message, default=str) + "\n")
    out.flush()

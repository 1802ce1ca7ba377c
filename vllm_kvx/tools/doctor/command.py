"""`vllm-kvx doctor`: runs the checks in a process of their own, and shows what they find.

Imports of a broken installation may crash or hang, and CUDA must not be touched here. So the checks
run in a child. Where it dies or hangs, that is a finding, and another child goes on behind it.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, Any

from vllm_kvx import __version__
from vllm_kvx.tools.doctor import report
from vllm_kvx.tools.doctor.findings import Finding, Request, problem
from vllm_kvx.tools.doctor.sections import SECTIONS

# The parent's own path: -m would put the working directory in front.
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from vllm_kvx.tools.doctor.child import main
main(*sys.argv[2:])
"""


def run(args: argparse.Namespace) -> int:
    """Looks, prints, and returns the exit code: 1 if anything is a problem."""
    request = Request(
        model=args.model,
        revision=args.revision,
        policy=args.kv_policy,
        layout=None if args.kv_layout is None else tuple(args.kv_layout),
        request_policies=args.kv_request_policies,
        additional_config=args.additional_config,
        ranks=args.tensor_parallel_size,
        gpu_memory=args.gpu_memory,
        prompt_len=args.prompt_len,
        serve_args=tuple(args.serve_args),
    )
    found: dict[str, list[Finding]] = {}
    for name, findings in examine(request, args.timeout):
        found[name] = findings
        if not args.json:
            print(report.section(name, findings), flush=True)
    if args.json:
        print(report.as_json(__version__, found))
    else:
        print(report.verdict(found, request))
    return report.exit_code(found)


def examine(request: Request, timeout: float) -> Iterator[tuple[str, list[Finding]]]:
    """Every section with what was found, as soon as it is done.

    timeout: seconds without a word, after which a section counts as hanging.
    """
    names = [section.name for section in SECTIONS]
    state: dict[str, Any] = {}
    done = 0
    while done < len(names):
        with tempfile.TemporaryFile() as said, _Child(request, done, state, said) as child:
            findings: list[Finding] = []
            for message in child.messages(timeout):
                if "finding" in message:
                    findings.append(Finding(*message["finding"]))
                elif "done" in message:
                    state = message["state"]
                    yield names[done], findings
                    done, findings = done + 1, []
            if done < len(names):
                how = child.how_it_ended(timeout)
                findings.append(problem(f"the check {how}", _advice(names[done])))
                missing = {**state.get("missing", {}), names[done]: f"its check {how}"}
                state = {**state, "missing": missing}
                yield names[done], findings
                done += 1


def _advice(name: str) -> str:
    module = {"torch": "torch", "vllm": "vllm"}.get(name)
    return f"{sys.executable} -c 'import {module}' shows it" if module else ""


class _Child:
    """A process that runs the sections from one on; its own session, so that all of it can end.

    said: file for what it prints.
    """

    def __init__(
        self, request: Request, first: int, state: dict[str, Any], said: IO[bytes]
    ) -> None:
        read, write = os.pipe()
        self._said = said
        command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), str(write), str(first)]
        command += [json.dumps(dataclasses.asdict(request)), json.dumps(state)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            pass_fds=[write],
            process_group=0,
        )
        os.close(write)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(read,), daemon=True)
        self._reader.start()
        self._hung = False

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        # Also where this process is interrupted: nothing of it may stay behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def messages(self, timeout: float) -> Iterator[dict[str, Any]]:
        """What it reports, until it has ended or says nothing for `timeout` seconds."""
        while True:
            try:
                line = self._lines.get(timeout=timeout)
            except queue.Empty:
                self._hung = True
                return
            if line is None:
                return
            # The last line of one that dies may be cut.
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def how_it_ended(self, timeout: float) -> str:
        """Why there is no more to come, as the end of a sentence."""
        if self._hung:
            return f"hangs: no answer in {timeout:g} s{self._last_line()}"
        # Not reaped yet: its number stays its own until `__exit__` has ended its session.
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        code = status.si_status if status is not None else 0
        killed = status is not None and status.si_code != os.CLD_EXITED
        how = f"ended with exit code {code}"
        if killed:
            how = f"was killed by {signal.Signals(code).name}"
        return how + self._last_line()

    def _last_line(self) -> str:
        """What it printed last, as the end of a sentence; empty if it printed nothing."""
        # Not by seeking: it may still write, at an offset that both share.
        file = self._said.fileno()
        size = os.fstat(file).st_size
        lines = os.pread(file, 4096, max(size - 4096, 0)).decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; the last that it said: {last}" if last else ""

    def _read(self, pipe: int) -> None:
        with os.fdopen(pipe) as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

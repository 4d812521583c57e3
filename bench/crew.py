"""Several processes that do one job each, all of them beginning at the same moment.

A member's module ends with `crew.member(work)`; `run_crew` starts one such process for each job. They speak in
lines of JSON: the job in, then `ready` out, an empty line in once everybody is; then what is done, and what came of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import uvloop

from bench.processes import START_SECONDS, STOP_SECONDS, BenchError, started

__all__ = ["Pace", "Work", "member", "run_crew"]

STALL_SECONDS: Final = 120.0
"""How long nothing at all may get done before a crew is given up."""
PACE_SECONDS: Final = 0.2
"""How often progress is told."""
_TAIL_LINES: Final = 15

Advance = Callable[[int], None]
Work = Callable[[Mapping[str, Any], Callable[[], Awaitable[None]], Advance], Awaitable[Any]]
"""Does a job, given what to await once it is prepared and whom to tell of progress; what it returns is JSON."""

_Said: TypeAlias = "queue.SimpleQueue[tuple[int, dict[str, Any] | None]]"
"""What members say, by their number; None when one ends before it has a result."""


class Pace:
    """Tells progress a few times a second instead of at each step."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._untold = 0
        self._next = 0.0

    def step(self) -> None:
        """Another one is done."""
        self._untold += 1
        if (now := time.monotonic()) >= self._next:
            self.flush()
            self._next = now + PACE_SECONDS

    def flush(self) -> None:
        """Tell what has not been told."""
        untold, self._untold = self._untold, 0
        if untold:
            self._advance(untold)


def member(work: Work) -> None:
    """Be one process of a crew: do the job that standard input says."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints must not get among the answers

    def say(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    async def ready() -> None:
        say(ready=True)
        if not await asyncio.to_thread(sys.stdin.readline):
            raise BenchError("whoever started this process is gone")

    async def run() -> None:
        job = json.loads(await asyncio.to_thread(sys.stdin.readline))
        say(result=await work(job, ready, lambda done: say(done=done)))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def run_crew(module: str, jobs: Sequence[Mapping[str, Any]], folder: Path, advance: Advance) -> list[Any]:
    """Have the jobs done by a process each.

    Args:
        module: what a member runs, `bench.contender` for example.
        jobs: one for each process; JSON.
        folder: where the members' standard error goes.
        advance: told of progress.

    Returns:
        What came of each job, in their order.

    Raises:
        BenchError: a process ended without a result, or nothing gets done any more; the message ends with its log.
    """
    said: _Said = queue.SimpleQueue()
    logs = [folder / f"member-{number}.log" for number in range(len(jobs))]

    def tail(number: int) -> str:
        lines = logs[number].read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def hear(seconds: float) -> tuple[int, dict[str, Any]]:
        try:
            number, message = said.get(timeout=seconds)
        except queue.Empty:
            raise BenchError(f"the processes of {module} have done nothing for {seconds:.0f} s") from None
        if message is None:
            raise BenchError(f"a process of {module} ended before its time\n{tail(number)}")
        return number, message

    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_process(module, number, log, said)) for number, log in enumerate(logs)]
        for process, job in zip(processes, jobs, strict=True):
            _tell(process, json.dumps(job))
        for _ in jobs:
            hear(START_SECONDS)  # that one of them is ready
        for process in processes:
            _tell(process, "")
        results: dict[int, Any] = {}
        while len(results) < len(jobs):
            number, message = hear(STALL_SECONDS)
            if "result" in message:
                results[number] = message["result"]
            else:
                advance(message["done"])
        for process in processes:
            # They close what they have open; those that do not are ended with the block.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        return [results[number] for number in range(len(jobs))]


@contextlib.contextmanager
def _process(module: str, number: int, log: Path, said: _Said) -> Iterator[subprocess.Popen[bytes]]:
    """A member, and a thread that listens to it; both are gone after the block."""
    command = [sys.executable, "-m", module]
    with (
        log.open("wb") as errors,
        contextlib.ExitStack() as after,
        started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        listener = threading.Thread(target=_listen, args=(number, process, said), daemon=True)
        after.callback(_close, process, listener)
        listener.start()
        yield process


def _close(process: subprocess.Popen[bytes], listener: threading.Thread) -> None:
    listener.join(STOP_SECONDS)  # the process has ended, and so has what it said
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _tell(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, which whoever listens to it will hear
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()


def _listen(number: int, process: subprocess.Popen[bytes], said: _Said) -> None:
    assert process.stdout is not None
    finished = False
    for line in process.stdout:
        message = json.loads(line)
        finished = finished or "result" in message
        said.put((number, message))
    if not finished:
        said.put((number, None))

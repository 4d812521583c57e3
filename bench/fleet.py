"""The processes of a workload's runners, seen from the one that started them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bench.drivers.runners import FINISH_SECONDS, GO, STOP, STOP_NOW, Job
from bench.processes import START_SECONDS, BenchError, started

_LOG_LINES: Final = 15
WATCH_SECONDS: Final = 0.5


class Fleet:
    """Processes that have their runners ready to begin."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
        self._processes = processes
        self._logs = logs

    def begin(self) -> None:
        """Have the runners begin."""
        self._tell(GO)

    def _tell(self, what: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, which whoever listens to it will hear
                process.stdin.write(f"{what}\n".encode())
                process.stdin.flush()

    async def hear(self, seconds: float) -> list[str]:
        """The next line of each process.

        Raises:
            BenchError: one ended, or takes longer.
        """
        waiting = [asyncio.to_thread(self._line, process) for process in self._processes]
        try:
            lines = await asyncio.wait_for(asyncio.gather(*waiting), seconds)
        except TimeoutError:
            raise BenchError(f"the processes of the runners did not answer within {seconds:.0f} s") from None
        if not all(lines):
            raise self._ended(lines.index(""))
        return lines

    @staticmethod
    def _line(process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().decode()

    async def watch(self) -> None:
        """Return never.

        Raises:
            BenchError: a process ended.
        """
        while True:
            for number, process in enumerate(self._processes):
                if process.poll() is not None:
                    raise self._ended(number)
            await asyncio.sleep(WATCH_SECONDS)

    def _ended(self, number: int) -> BenchError:
        tail = "\n".join(self._logs[number].read_text(errors="replace").splitlines()[-_LOG_LINES:])
        return BenchError(f"a process of runners ended before its time\n{tail}")

    async def stop(self, *, now: bool = False) -> list[dict[str, Any]]:
        """Have the runners end, and say what they did, a mapping for each process.

        Args:
            now: also those that have a rollout.
        """
        self._tell(STOP_NOW if now else STOP)
        return [json.loads(line) for line in await self.hear(FINISH_SECONDS + START_SECONDS)]


@contextlib.contextmanager
def fleet(jobs: Sequence[Job], folder: Path) -> Iterator[Fleet]:
    """A process for each job, gone when the block ends; their standard error goes to a folder."""
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        # Once the processes are gone: until then somebody may be reading.
        stack.callback(_close_pipes, processes)
        logs = [folder / f"runners-{os.getpid()}-{job.first}.log" for job in jobs]
        for job, log in zip(jobs, logs, strict=True):
            output = stack.enter_context(log.open("wb"))
            command = [sys.executable, "-m", "bench.drivers.runners"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": output}
            process = stack.enter_context(started(command, **pipes))
            processes.append(process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            process.stdin.flush()
        yield Fleet(processes, logs)


def _close_pipes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def jobs_of(total: int, processes: int, **common: Any) -> list[Job]:
    """The jobs of so many processes that have so many runners all together."""
    bounds = [total * number // processes for number in range(processes + 1)]
    return [Job(first=first, runners=last - first, **common) for first, last in pairwise(bounds) if last > first]

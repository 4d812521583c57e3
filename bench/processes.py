"""Child processes in groups of their own, which are gone when the block that started them ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
"""The repository: where every child is started."""
START_SECONDS: Final = 60.0
FILL_SECONDS: Final = 600.0
STOP_SECONDS: Final = 10.0
JOB_SECONDS: Final = 900.0


class BenchError(Exception):
    """The comparison cannot go on; the message says why."""


def python_path(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a child: ours, with the repository's packages on the path and no settings of the store's."""
    kept = {name: value for name, value in environment.items() if not name.startswith("LIGHTNING_SQL_")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "api")])}


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own; the whole group is ended with the block, first politely."""
    process = subprocess.Popen[bytes](command, cwd=ROOT, env=python_path(), start_new_session=True, **options)
    _running.add(process)
    try:
        yield process
    finally:
        _running.discard(process)
        _end_group(process)


_running: Final[set[subprocess.Popen[bytes]]] = set()


def abandon() -> None:
    """Kill every process that was started, so that whoever waits for one, in whatever thread, goes on."""
    for process in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
            break
    # What the group's leader left behind, if anything.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path, seconds: float) -> None:
    """Return when a server answers its health route.

    Raises:
        BenchError: it ended, or it does not; the message ends with its log.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/v1/agl/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise BenchError(f"the server at {url} did not start within {seconds:.0f} s\n{tail}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a driver answered to a job."""

    values: dict[str, float]
    calls: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    unavailable: str | None = None


class Driver:
    """A process that makes the calls, one job after the other."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def run(self, job: Mapping[str, Any]) -> Outcome:
        """Have a job done.

        Raises:
            BenchError: the process ended, or takes much too long.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        readable, _, _ = select.select([process.stdout], [], [], JOB_SECONDS)
        answer = process.stdout.readline() if readable else b""
        if not answer:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise BenchError(f"a driver ended or hung on {dict(job)}\n{tail}")
        return Outcome(**json.loads(answer))


@contextlib.contextmanager
def driver(python: str, kind: str, log: Path) -> Iterator[Driver]:
    """A driver process of a kind, run by a Python."""
    command = [python, "-m", "bench.drivers.run", kind]
    with (
        log.open("wb") as output,
        started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output) as process,
    ):
        yield Driver(process, log)

"""`lightning-sql` as a command, run the way a reader of the docs runs it."""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from bench.processes import python_path

ROOT = Path(__file__).parents[1]


def environment(folder: Path) -> dict[str, str]:
    """Variables with which `lightning-sql` is this checkout's, none of its settings is given, and output is plain."""
    binaries = folder / "bin"
    binaries.mkdir()
    script = binaries / "lightning-sql"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lightning_api "$@"\n')
    script.chmod(0o755)
    temporary = folder / "temporary"
    temporary.mkdir()
    return {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'api'}",
        "HOME": str(folder),
        "TMPDIR": str(temporary),
        "COLUMNS": "80",
    }


def call(port: int, path: str, body: str | None = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """One request to this machine: the status and the body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET" if body is None else "POST", path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def _ready(port: int, health: str) -> bool:
    try:
        return call(port, health)[0] == 200
    except OSError:
        return False


@contextlib.contextmanager
def serving(
    arguments: Sequence[str], port: int, place: Path, variables: dict[str, str], health: str = "/readyz"
) -> Iterator[None]:
    """A server that was started by a command, perhaps through `make`; it must stop cleanly."""
    process = subprocess.Popen(arguments, cwd=place, env=variables, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not _ready(port, health):
            assert process.poll() is None, "the server ended by itself"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)
        yield
        # Ctrl-C would reach make as well, which then fails whatever its recipe does.
        for server in psutil.Process(process.pid).children() if arguments[0] == "make" else [process]:
            server.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


def run(arguments: Sequence[str], place: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A command, run to its end."""
    return subprocess.run(arguments, cwd=place, env=variables, capture_output=True, text=True, timeout=180, check=False)


def run_module(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of the repository as a program."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=python_path(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

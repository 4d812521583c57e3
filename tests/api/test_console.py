"""The console tracker: what it reckons, and how it shows it without getting in the way."""

import errno
import io
import logging
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from rich.console import Console

from lightning_api import display
from lightning_api.console import ConsoleRecorder, quantile, shown_seconds
from lightning_api.display import displayed, table_of
from lightning_sql.metrics import (
    CLAIMS,
    HTTP_CALLS,
    HTTP_LATENCY,
    QUEUE_DEPTH,
    QUEUE_OLDEST,
    RUNNING_ATTEMPTS,
    SPANS,
    STORE_CALLS,
    STORE_LATENCY,
)
from tests.api.conftest import environment


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def request(recorder: ConsoleRecorder, route: str, status: str, seconds: float) -> None:
    method, path = route.split()
    recorder.count(HTTP_CALLS, (path, method, status))
    recorder.observe(HTTP_LATENCY, (path, method, status), seconds)


def busy(recorder: ConsoleRecorder) -> None:
    """Ten seconds' worth of work."""
    for _ in range(90):
        request(recorder, "POST /claim", "200", 0.002)
    for _ in range(10):
        request(recorder, "POST /claim", "503", 3.0)
    request(recorder, "GET /workers", "404", 0.1)
    recorder.count(STORE_CALLS, ("dequeue", "dequeue", "OK"), 0.0)
    recorder.count(STORE_CALLS, ("dequeue", "dequeue", "OK"), 90)
    recorder.count(STORE_CALLS, ("dequeue", "dequeue", "DatabaseUnavailableError"), 10)
    recorder.count(STORE_CALLS, ("statistics", "statistics", "OK"), 0.0)
    recorder.observe(STORE_LATENCY, ("dequeue", "dequeue", "OK"), 0.001)
    recorder.count(CLAIMS, amount=50)
    recorder.count(SPANS, amount=400)
    recorder.set(QUEUE_DEPTH, (), 7)
    recorder.set(QUEUE_OLDEST, (), 12.4)
    recorder.set(RUNNING_ATTEMPTS, (), 3)


def test_rates_and_latencies() -> None:
    clock = Clock()
    recorder = ConsoleRecorder(clock)
    busy(recorder)
    clock.now += 10
    view = recorder.view()
    assert [row.name for row in view.requests] == ["POST /claim", "GET /workers"]
    claims, workers = view.requests
    assert (claims.per_second, claims.failed_per_second) == (10.0, 1.0)
    assert (workers.per_second, workers.failed_per_second) == (0.1, 0.1)
    p50, p95, p99 = claims.quantiles
    assert p50 is not None
    assert 0.001 < p50 <= 0.0025
    assert p95 is not None
    assert p99 is not None
    assert 2.5 < p95 < p99 <= 5
    [dequeue] = view.methods
    assert (dequeue.name, dequeue.per_second, dequeue.failed_per_second) == ("dequeue", 10.0, 1.0)
    assert view.all_requests.per_second == pytest.approx(10.1)
    line = view.line()
    assert line.startswith("10.1 requests/s, 1.1 failed  P50 ")
    assert "queue 7, oldest 12 s, running 3" in line
    assert "claims 5.0/s" in line
    assert "spans 40.0/s" in line


def test_only_the_last_minute_counts() -> None:
    clock = Clock()
    recorder = ConsoleRecorder(clock)
    busy(recorder)
    for _ in range(40):
        clock.now += 2
        view = recorder.view()
    assert view.requests == []
    assert view.all_requests.quantiles == (None, None, None)
    assert set(view.rates.values()) == {0.0}
    assert view.queue() == "queue 7, oldest 12 s, running 3"
    request(recorder, "GET /workers", "200", 0.1)
    clock.now += 2
    [row] = recorder.view().requests
    assert row.per_second == pytest.approx(1 / 60, rel=0.05)
    assert recorder.view().line().startswith("0.0 requests/s, 0.0 failed  P50 75 ms")


@pytest.mark.parametrize(
    ("buckets", "share", "value"),
    [
        ([0, 0, 0, 0], 0.5, None),
        ([4, 0, 0, 0], 0.5, 0.5),
        ([0, 4, 0, 0], 0.5, 1.5),
        ([1, 0, 3, 0], 0.5, pytest.approx(2 + 2 / 3)),
        ([0, 0, 0, 5], 0.5, 4.0),
        ([1, 1, 1, 1], 1.0, 4.0),
        ([0, 2, 0, 0], 0.0, 1.0),
    ],
)
def test_quantiles(buckets: list[int], share: float, value: Any) -> None:
    assert quantile((1.0, 2.0, 4.0), buckets, share) == value


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (2e-6, "2 µs"), (0.0123, "12.3 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (2.5, "2.5 s")],
)
def test_durations(seconds: float | None, shown: str) -> None:
    assert shown_seconds(seconds) == shown


def rendered(recorder: ConsoleRecorder, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(table_of(recorder.view(), height))
    return console.export_text().splitlines()


def test_the_table_fits_the_terminal() -> None:
    clock = Clock()
    recorder = ConsoleRecorder(clock)
    assert len(rendered(recorder, 24)) <= 24
    busy(recorder)
    for number in range(50):
        request(recorder, f"GET /routes/{number}", "200", 0.001)
        recorder.count(STORE_CALLS, (f"method_{number}", "", "OK"))
    clock.now += 1
    for height in (24, 50):
        lines = rendered(recorder, height)
        assert len(lines) <= height
        assert "queue 7, oldest 12 s, running 3" in lines[0]
        [claims] = [line for line in lines if "POST /claim" in line]
        assert [cell.strip() for cell in claims.strip("│").split("│")][:3] == ["POST /claim", "100.0", "10.0"]
        assert any("more" in line for line in lines)


class Ended(io.StringIO):
    """A pipe that nobody reads any more, or a terminal that was closed."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str) -> int:
        raise OSError(self._number, os.strerror(self._number))


class Seen(io.StringIO):
    """Tells when something was written."""

    def __init__(self, wanted: str) -> None:
        super().__init__()
        self._wanted = wanted
        self.happened = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._wanted in self.getvalue():
            self.happened.set()
        return written


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lightning-sql console"]


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "LINE_SECONDS", 0.01)
    recorder = ConsoleRecorder()
    busy(recorder)
    seen = Seen("queue 7")
    with displayed(recorder, Console(file=seen)):
        assert seen.happened.wait(60)
    assert not threads()
    assert "\x1b" not in seen.getvalue()


def test_nobody_waits_for_who_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "LINE_SECONDS", 0.0)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    views = threading.Semaphore(0)

    class Watched(ConsoleRecorder):
        def view(self) -> Any:
            views.release()
            return super().view()

    with os.fdopen(writing, "w") as file:
        with displayed(Watched(), Console(file=file)):
            for _ in range(5):
                assert views.acquire(timeout=60)
        assert not threads()
    os.close(reading)


@pytest.mark.parametrize(("terminal", "number"), [(True, errno.EIO), (False, errno.EPIPE)])
def test_who_has_gone_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, number: int, eventually: Any
) -> None:
    monkeypatch.setattr(display, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(display, "TABLE_SECONDS", 0.0)
    with displayed(ConsoleRecorder(), Console(file=Ended(number), force_terminal=terminal)):
        eventually(lambda: not threads())


# The command, but with a table or a line several times a second.
OFTEN = """
import sys
from lightning_api import display
display.TABLE_SECONDS = display.LINE_SECONDS = 0.1
from lightning_api.cli import main
sys.argv[1:] = ["serve", "--database-url", "memory://", "--tracker", "console", "--port", "0"]
main()
"""


def read_until(descriptor: int, wanted: Callable[[str], bool]) -> str:
    text = ""
    while not wanted(text):
        try:
            read = os.read(descriptor, 65536)
        except OSError:  # how the end of a terminal shows
            read = b""
        if not read:
            break
        text += read.decode(errors="replace")
    return text


@pytest.mark.slow
def test_a_server_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", OFTEN],
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM="xterm", COLUMNS="200"),  # what is logged beside a table is broken at the width
    )
    os.close(theirs)
    try:
        text = read_until(ours, lambda text: " serving " in text and text.count("queue 0") > 2)
        assert "store method" in text
        process.send_signal(signal.SIGTERM)
        text += read_until(ours, lambda text: False)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    # What is logged has lines of its own.
    for logged in (" serving memory:// at http://127.0.0.1:", " stopped"):
        lines = [line for line in text.splitlines() if logged in line]
        assert len(lines) == 1, text[-3000:]
        [line] = lines
        assert "queue" not in line
    assert "Traceback" not in text


@pytest.mark.slow
def test_a_server_in_a_pipe_that_is_closed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OFTEN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        text = read_until(process.stdout.fileno(), lambda text: text.count("\n") > 2)
        assert all("requests/s" in line for line in text.splitlines()[:2])
        process.stdout.close()
        process.stdout = None
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
    assert " serving " in logged.decode()
    assert "Exception" not in logged.decode()


def test_what_else_writes_to_standard_error_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """Where the log goes to a file, the table must not take it to the terminal."""
    handler = logging.StreamHandler(sys.__stderr__)
    logger = logging.getLogger()
    logger.addHandler(handler)
    shown = io.StringIO()
    try:
        with displayed(ConsoleRecorder(), Console(file=shown, force_terminal=True)):
            logger.error("for the file")
        logger.error("and after it")
    finally:
        logger.removeHandler(handler)
    assert "for the file" not in shown.getvalue()

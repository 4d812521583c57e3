"""The console tracker: what a server does, as a live table on a terminal, and as a line now and then elsewhere."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Final, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lightning_api.console import ConsoleRecorder, Row, View, shown_seconds

__all__ = ["LINE_SECONDS", "TABLE_SECONDS", "displayed", "table_of"]

TABLE_SECONDS: Final = 2.0
"""How often the table is drawn anew."""
LINE_SECONDS: Final = 10.0
"""How often there is a line."""

_END_SECONDS: Final = 1.0
_OTHER_LINES: Final = 12
"""The lines of the terminal that are not rows."""


@contextmanager
def displayed(recorder: ConsoleRecorder, console: Console | None = None) -> Generator[None]:
    """Display what a recorder takes down while the body runs.

    A thread does it, and nothing waits for it: a terminal that takes nothing holds up no request.
    """
    stop = threading.Event()
    shown = Console(file=_standard_output()) if console is None else console
    show = _show_table if shown.is_terminal else _show_lines
    thread = threading.Thread(target=show, args=(recorder, shown, stop), name="lightning-sql console", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_END_SECONDS)


def _standard_output() -> TextIO:
    """Standard output, in a file of its own: at its end the interpreter would wait for what was not written yet."""
    try:
        descriptor = os.dup(sys.stdout.fileno())
    except OSError:  # somebody has put a file in memory there
        return sys.stdout
    return open(descriptor, "w", encoding=sys.stdout.encoding, errors="replace")  # noqa: PTH123


def _show_lines(recorder: ConsoleRecorder, console: Console, stop: threading.Event) -> None:
    with suppress(OSError):  # who read it has gone
        while not stop.wait(LINE_SECONDS):
            view = recorder.view()
            if _takes_more(console.file):
                console.file.write(f"{time.strftime('%H:%M:%S')}  {view.line()}\n")
                console.file.flush()


def _show_table(recorder: ConsoleRecorder, console: Console, stop: threading.Event) -> None:
    first = table_of(recorder.view(), console.height)
    logs_here = sys.stderr.isatty()
    live = Live(first, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=logs_here)
    with suppress(OSError), live, _logged_above():
        while not stop.wait(TABLE_SECONDS):
            table = table_of(recorder.view(), console.height)
            if _takes_more(console.file):
                live.update(table, refresh=True)


@contextmanager
def _logged_above() -> Generator[None]:
    """Let what is logged to the terminal appear above the table, which would else be drawn over it."""
    moved = list(_handlers_of_standard_error())
    for handler in moved:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler in moved:
            handler.setStream(sys.__stderr__)


def _handlers_of_standard_error() -> Iterator[logging.StreamHandler[Any]]:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            writing = cast("logging.StreamHandler[Any]", handler)
            if writing.stream is sys.__stderr__:
                yield writing


def _takes_more(file: IO[str]) -> bool:
    """Whether a line can be written without waiting for somebody to read: a pipe may be full, a terminal stopped."""
    try:
        descriptor = file.fileno()
    except (OSError, ValueError):
        return True  # a file in memory
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


def table_of(view: View, height: int) -> Group:
    """A view for a terminal of so many lines."""
    rows = max(height - _OTHER_LINES, 4)
    routes = min(len(view.requests), max(rows - len(view.methods), rows // 2))
    return Group(
        Text(f"{view.queue()}  {view.work()}", no_wrap=True, overflow="ellipsis"),
        _calls("request", view.requests, routes),
        _calls("store method", view.methods, rows - routes),
    )


def _calls(name: str, rows: Sequence[Row], most: int) -> Table:
    table = Table(caption=None if len(rows) <= most else f"and {len(rows) - most} more", expand=True)
    table.add_column(name, ratio=1, no_wrap=True, overflow="ellipsis")
    for heading in ("a second", "failed", "P50", "P95", "P99"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows[:most]:
        failed = f"{row.failed_per_second:.1f}"
        table.add_row(row.name, f"{row.per_second:.1f}", failed, *map(shown_seconds, row.quantiles))
    return table

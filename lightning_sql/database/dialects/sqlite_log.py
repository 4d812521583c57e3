"""The write-ahead log of an SQLite file, which must not grow for ever.

SQLite begins it anew when a writer comes by while nobody reads from it. Where somebody always does, that moment never
comes, and the log would take all that is ever written. So that whoever writes now and then makes that moment: nobody
else writes meanwhile, and those who begin to read do not need the log.
"""

from __future__ import annotations

import time
from pathlib import Path
from sqlite3 import Cursor
from typing import Final

from lightning_sql.database.dialects.words import word

__all__ = ["WriteAheadLog"]

MOST_BYTES: Final = 64 * 2**20
"""From this size on it is emptied: four times that at which SQLite copies it into the file by itself."""
LOOK_SECONDS: Final = 0.25
"""Least time between two looks at its size."""
PATIENCE_MILLISECONDS: Final = 1000
"""How long whoever reads from it is waited for, and writers with that."""
PAUSE_SECONDS: Final = 10.0
"""Before another try, after somebody read for longer."""


class WriteAheadLog:
    """The log of one file, as the thread that writes looks after it."""

    def __init__(self, file: Path) -> None:
        self._log = file.with_name(f"{file.name}-wal")
        self._next = 0.0

    def is_too_large(self) -> bool:
        """Whether it is time to empty it."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOOK_SECONDS
        try:
            return self._log.stat().st_size > MOST_BYTES
        except OSError:  # it comes and goes with those who use the file
            return False

    def empty(self, cursor: Cursor) -> None:
        """Copy it into the file and begin it anew, if those who read from it end soon enough."""
        [patience] = cursor.execute("PRAGMA busy_timeout").fetchone()
        cursor.execute(f"PRAGMA busy_timeout = {PATIENCE_MILLISECONDS}")
        try:
            busy, _, _ = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            cursor.execute(f"PRAGMA busy_timeout = {word(str(patience))}")
        if busy:
            self._next = time.monotonic() + PAUSE_SECONDS

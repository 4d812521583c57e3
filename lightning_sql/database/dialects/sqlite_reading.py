"""Rows of SQLite's, as many of them as are wanted at once."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from sqlite3 import Cursor
from typing import Any

__all__ = ["bounded"]


def bounded(cursor: Cursor, most_bytes: int, heavy: Sequence[int]) -> tuple[list[Any], bool]:
    """Rows until their `heavy` columns have so many bytes; whether that was before the end."""
    if not heavy:
        return cursor.fetchall(), False
    payloads = itemgetter(slice(heavy[0], heavy[0] + 1)) if len(heavy) == 1 else itemgetter(*heavy)
    rows: list[Any] = []
    left = most_bytes
    for row in cursor:
        rows.append(row)
        for text in payloads(row):
            if text is not None:
                left -= len(text) if text.isascii() else 3 * len(text)
        if left <= 0:
            return rows, True
    return rows, False

"""A server whose SQLite file can be made full from outside: `python -m tests.faults.narrow serve …`.

While a file of the database's name with `.pages` after it is there, the number in it is the `max_page_count`
of the connection that writes: such a limit is a connection's own, so that nobody else can set it.
"""

from pathlib import Path
from typing import Any

from lightning_api.cli import main
from lightning_sql.database.dialects.sqlite_thread import _Seat

__all__ = ["limit_of", "limit_pages"]

AMPLE_PAGES = 4_294_967_294
"""SQLite's own limit."""


def limit_of(database: str | Path) -> Path:
    """Where the limit of a database file is written."""
    return Path(f"{database}.pages")


def limit_pages() -> None:
    """Let every transaction that writes look first how large the file may grow."""
    begin = _Seat._begun

    def begun(self: _Seat) -> Any:
        opened = begin(self)
        if self._writes:
            try:
                most = int(limit_of(str(self._engine.url.database)).read_text())
            except FileNotFoundError:
                most = AMPLE_PAGES
            opened[1].execute(f"PRAGMA max_page_count = {most}")
        return opened

    _Seat._begun = begun


if __name__ == "__main__":
    limit_pages()
    main()

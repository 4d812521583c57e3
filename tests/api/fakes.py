"""Stores that only do what a test needs."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from lightning_sql.store.row_store import RowPage
from lightning_sql.store.rows import span_draft
from lightning_sql.testing.samples import make_span
from tests.rows import spliced_row


class StoreOfRows:
    """A store of which only its rows are used."""

    recorder = None

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    async def release_waiters(self) -> None:
        pass

    async def maintain(self) -> None:
        pass

    async def sweep(self) -> int:
        return 0

    async def close(self) -> None:
        pass


def span_row(number: int, **fields: Any) -> Sequence[Any]:
    """The row of a span, as it is read to be written."""
    return spliced_row(span_draft(make_span("r", "a", f"s{number}", number, **fields)))


class PagesOfSpans:
    """Rows whose every page of spans is the same: chunk after chunk, perhaps with a failure at the end."""

    def __init__(self, chunks: Sequence[Sequence[Any]], error: Exception | None = None) -> None:
        self.chunks = chunks
        self.error = error
        self.read = 0
        """How many of the further chunks were asked for."""
        self.closed = False
        self.asked: list[Any] = []
        self.before_chunk: Callable[[], None] = lambda: None

    async def span_page(self, query: Any) -> RowPage:
        self.asked.append(query)
        total = sum(map(len, self.chunks)) if query.total else None
        return RowPage(self.chunks[0], total, self._rest())

    async def _rest(self) -> AsyncIterator[Sequence[Any]]:
        try:
            for chunk in self.chunks[1:]:
                self.before_chunk()
                self.read += 1
                yield chunk
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True

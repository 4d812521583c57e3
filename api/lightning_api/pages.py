"""Pages of rows as answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from lightning_api.calls import Call
from lightning_api.models import Page
from lightning_api.replies import JSON_HEADERS, Reply, Stream
from lightning_sql.store.row_json import RowForm
from lightning_sql.store.row_store import RowPage

__all__ = ["page_reply"]


def page_reply(call: Call, query: Page, page: RowPage, form: RowForm) -> Reply | Stream:
    """The answer to a query: whole if the page is, and else chunk by chunk as it is read."""
    exact = call.exact
    total = b"null" if page.total is None else b"%d" % page.total
    end = b'],"limit":%d,"offset":%d,"total":%b}' % (query.limit, query.offset, total)
    begin = b'{"items":[', _items(form, page.first, exact)
    if page.rest is None:
        return Reply(200, b"".join((*begin, end)), JSON_HEADERS)
    return Stream(200, _parts(b"".join(begin), bool(page.first), page.rest, end, form, exact))


def _items(form: RowForm, rows: Sequence[Any], exact: bool) -> memoryview:
    return memoryview(form.array(rows, exact=exact))[1:-1]


async def _parts(
    begin: bytes, begun: bool, rest: AsyncIterator[Sequence[Any]], end: bytes, form: RowForm, exact: bool
) -> AsyncIterator[bytes]:
    try:
        yield begin
        async for rows in rest:
            if rows:
                yield b"".join((b"," if begun else b"", _items(form, rows, exact)))
                begun = True
        yield end
    finally:
        close = getattr(rest, "aclose", None)
        if close is not None:
            await close()

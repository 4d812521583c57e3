"""Pages of the native store: one statement each, long ones in chunks."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, get_args

from pydantic import BaseModel
from sqlalchemy import ColumnElement, Executable, Select, Table, and_, bindparam, func, select

from lightning_sql.collections.sql.conditions import Translation, order_by
from lightning_sql.database.dialects.base import Dialect
from lightning_sql.database.dialects.hot import Row
from lightning_sql.database.native import ATTEMPTS, ROLLOUTS, SPANS, raw_columns
from lightning_sql.database.reading import Reading
from lightning_sql.database.schema import PARTITION, SEQ
from lightning_sql.errors import InvalidRequestError
from lightning_sql.filters import FilterOptions, Sort, SortOptions, normalize_filter, normalize_sort
from lightning_sql.records import Rollout, RolloutStatus, Span
from lightning_sql.store.interface import SortOrder
from lightning_sql.store.page_statements import (
    ROLLOUT_LISTING,
    SPAN_LISTING,
    SPLICED_SPAN_LISTING,
    Form,
    PageStatements,
    Question,
)
from lightning_sql.store.row_store import RolloutQuery, RowPage, SpanQuery

__all__ = ["CHUNK_BYTES", "CHUNK_ROWS", "Pages", "check_page"]

CHUNK_ROWS: Final = 1024
"""Most rows that one statement answers; a round thousand and what tells that it was all are one answer."""
CHUNK_BYTES: Final = 8 * 1024 * 1024
"""About how many bytes of payload one statement answers at most, unless a single row has more."""
MERGED_ROWS: Final = 10_000
"""How far into a list its statuses are merged; further on, one sort costs less."""

_STATUSES: Final[tuple[RolloutStatus, ...]] = get_args(RolloutStatus)
_LATEST: Final = "latest"


class Fetcher(Protocol):
    """What runs a statement that reads."""

    async def fetch(self, statement: Executable) -> Sequence[Row]:
        """Its rows."""
        ...

    async def fetch_bounded(
        self, reading: Reading, values: Mapping[str, Any], most_bytes: int, heavy: Sequence[int]
    ) -> tuple[Sequence[Row], bool]:
        """As `HotPath.fetch_bounded`."""
        ...


def check_page(limit: int, offset: int) -> None:
    """Check the bounds of a page.

    Raises:
        InvalidRequestError: they are none.
    """
    if limit == 0 or limit < -1:
        raise InvalidRequestError("limit must be -1 (unlimited) or at least 1")
    if offset < 0:
        raise InvalidRequestError("offset must be at least 0")


def _sort(sort_by: str | None, sort_order: SortOrder, item_type: type[BaseModel]) -> Sort | None:
    options: SortOptions | None = None if sort_by is None else {"name": sort_by, "order": sort_order}
    return normalize_sort(options, item_type)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The rows of one statement."""

    rows: Sequence[Row]
    """Each continues with columns that are not the record's."""
    width: int
    total: int
    cut: bool
    """Whether there would be more rows but for their size."""
    ended: bool
    """Whether there are no more rows."""

    @property
    def seqs(self) -> list[int]:
        """The insertion numbers of the rows."""
        return [row[self.width] for row in self.rows]


_UNCHANGING: Final = ("rollout_id", "start_time")
"""What a rollout keeps; a span keeps everything."""
_ALL: Final = 2**62


class Pages:
    """The pages of one partition."""

    def __init__(self, dialect: Dialect, partition: str) -> None:
        self._dialect = dialect
        self._partition = partition
        self._statements = PageStatements(dialect, partition)

    # One table at a time

    async def rows(
        self,
        hot: Fetcher,
        table: Table,
        item_type: type[BaseModel],
        names: Sequence[str],
        filter_: FilterOptions,
        sort_by: str | None,
        sort_order: SortOrder,
        limit: int,
        offset: int,
        inserted: str = SEQ,
    ) -> tuple[list[Row], int]:
        """A page of a table whose pages are never long; how many match in all."""
        check_page(limit, offset)
        sort = _sort(sort_by, sort_order, item_type)
        where = self._where(table, item_type, filter_)
        total = select(func.count()).select_from(table).where(where).scalar_subquery()
        statement = select(total, *raw_columns(table, names)).where(where)
        statement = statement.order_by(*order_by(sort, table, item_type, inserted))
        found = await hot.fetch(self._window(statement, limit, offset))
        if found:
            return [row[1:] for row in found], found[0][0]
        return [], await self._count(hot, table, where) if offset else 0

    def _where(self, table: Table, item_type: type[BaseModel], filter_: FilterOptions) -> ColumnElement[bool]:
        translation = Translation(normalize_filter(filter_), table, item_type, self._dialect)
        return and_(table.c[PARTITION] == self._partition, translation.where)

    @staticmethod
    def _window(statement: Select[Any], limit: int, offset: int) -> Select[Any]:
        if limit >= 0:
            statement = statement.limit(limit)
        elif offset:
            statement = statement.limit(_ALL)  # SQLite has no OFFSET without LIMIT
        return statement.offset(offset) if offset else statement

    @staticmethod
    async def _count(hot: Fetcher, table: Table, where: ColumnElement[bool]) -> int:
        [[count]] = await hot.fetch(select(func.count()).select_from(table).where(where))
        return count

    # Rollouts and spans

    async def rollouts(self, hot: Fetcher, query: RolloutQuery) -> RowPage:
        """A page of rollouts; each row continues with that of the latest attempt."""
        check_page(query.limit, query.offset)
        sort = _sort(query.sort_by, query.sort_order, Rollout)
        filter_: FilterOptions = {
            "status": {"within": query.status_in},
            "rollout_id": {"within": query.rollout_id_in, "contains": query.rollout_id_contains},
            "_aggregate": query.filter_logic,
        }
        plain = query.rollout_id_in is None and query.rollout_id_contains is None
        statuses = _STATUSES if query.status_in is None else tuple(sorted(set(query.status_in)))
        question = Question(
            listing=ROLLOUT_LISTING,
            sort=sort,
            where=lambda: self._where(ROLLOUTS, Rollout, filter_),
            key=(query.status_in is None, query.filter_logic) if plain else None,
            values={},
            statuses=statuses if plain else None,
        )
        return await self._page(hot, question, query.limit, query.offset, query.total)

    async def spans(self, hot: Fetcher, query: SpanQuery) -> RowPage:
        """A page of spans."""
        check_page(query.limit, query.offset)
        sort = _sort(query.sort_by, query.sort_order, Span)
        filter_: FilterOptions = {
            "trace_id": {"exact": query.trace_id, "contains": query.trace_id_contains},
            "span_id": {"exact": query.span_id, "contains": query.span_id_contains},
            "parent_id": {"exact": query.parent_id, "contains": query.parent_id_contains},
            "name": {"exact": query.name, "contains": query.name_contains},
            "_aggregate": query.filter_logic,
        }
        which = query.attempt_id if query.attempt_id in (None, _LATEST) else "another"

        def where() -> ColumnElement[bool]:
            rollout_id = bindparam("rollout_id", type_=SPANS.c.rollout_id.type)
            matching = and_(self._where(SPANS, Span, filter_), SPANS.c.rollout_id == rollout_id)
            if which is None:
                return matching
            if which == _LATEST:
                return and_(matching, SPANS.c.attempt_id == self._latest_attempt_id(rollout_id))
            return and_(matching, SPANS.c.attempt_id == bindparam("attempt_id", type_=SPANS.c.attempt_id.type))

        question = Question(
            listing=SPLICED_SPAN_LISTING if query.spliced else SPAN_LISTING,
            sort=sort,
            where=where,
            key=None if _is_filtered(filter_) else ("of", which),
            values={"rollout_id": query.rollout_id, "attempt_id": query.attempt_id},
        )
        return await self._page(hot, question, query.limit, query.offset, query.total)

    def _latest_attempt_id(self, rollout_id: ColumnElement[str]) -> Any:
        return (
            select(ATTEMPTS.c.attempt_id)
            .where(ATTEMPTS.c[PARTITION] == self._partition, ATTEMPTS.c.rollout_id == rollout_id)
            .order_by(ATTEMPTS.c.sequence_id.desc())
            .limit(1)
            .scalar_subquery()
        )

    async def _page(self, hot: Fetcher, question: Question, limit: int, offset: int, total: bool) -> RowPage:
        wanted = CHUNK_ROWS if limit < 0 else min(limit, CHUNK_ROWS)
        merged = (
            bool(question.statuses)
            and question.sort is not None
            and question.sort.field == "start_time"
            and wanted + offset <= MERGED_ROWS
        )
        # A list without a limit tells how long it is by its end, if it ends here.
        counted = total and limit > 0
        form = Form(counted=counted, skipping=offset > 0, merged=merged)
        values = {"wanted": wanted, "skipped": offset, "reach": wanted + offset}
        chunk = await self._chunk(hot, question, self._statements.page(question, form), values)
        page = RowPage(chunk.rows, None)
        so_far = offset + len(chunk.rows)
        if total:
            if counted and chunk.rows:
                page.total = chunk.total
            elif chunk.ended and (chunk.rows or not offset):
                page.total = so_far
            else:
                page.total = await self._total(hot, question)
        if not chunk.ended and len(chunk.rows) != limit and (page.total is None or so_far < page.total):
            page.rest = self._rest(hot, question, limit, offset, chunk)
        return page

    async def _total(self, hot: Fetcher, question: Question) -> int:
        [[count]], _ = await hot.fetch_bounded(self._statements.total(question), question.values, CHUNK_BYTES, ())
        return count

    @staticmethod
    async def _chunk(hot: Fetcher, question: Question, reading: Reading, values: Mapping[str, Any]) -> _Chunk:
        """One statement's rows: as many as asked for, or as few as keep within `CHUNK_BYTES`."""
        given = {**question.values, **values, "most_bytes": CHUNK_BYTES}
        rows, stopped = await hot.fetch_bounded(reading, given, CHUNK_BYTES, question.listing.heavy)
        if not rows:
            return _Chunk(rows, question.listing.width, 0, False, True)
        *_, size, total = rows[0]
        cut = len(rows) < values["wanted"] and (stopped or (size or 0) >= CHUNK_BYTES)
        return _Chunk(rows, question.listing.width, total, cut, len(rows) < values["wanted"] and not cut)

    async def _rest(
        self, hot: Fetcher, question: Question, limit: int, offset: int, first: _Chunk
    ) -> AsyncIterator[Sequence[Row]]:
        """The chunks of a page after the first one."""
        sort = question.sort
        if sort is None or (question.listing.table is SPANS and sort.field == "sequence_id" and not sort.descending):
            left = limit if limit < 0 else limit - len(first.rows)
            chunks = self._by_key(hot, question, left, first)
        else:
            chunks = self._by_list(hot, question, sort, limit, offset, first)
        async for chunk in chunks:
            yield chunk

    async def _by_key(self, hot: Fetcher, question: Question, limit: int, last: _Chunk) -> AsyncIterator[Sequence[Row]]:
        """In the order of an index: each chunk begins behind the last row of the one before."""
        reading = self._statements.page(question, Form(behind=True))
        while limit:
            values: dict[str, Any] = {"wanted": CHUNK_ROWS if limit < 0 else min(limit, CHUNK_ROWS)}
            values["after_seq"] = last.rows[-1][last.width]
            if question.sort is not None:
                values["after_place"] = last.rows[-1][question.listing.names.index(question.sort.field)]
            chunk = await self._chunk(hot, question, reading, values)
            if chunk.rows:
                yield chunk.rows
            if chunk.ended:
                return
            limit -= len(chunk.rows) if limit > 0 else 0
            last = chunk

    async def _by_list(
        self, hot: Fetcher, question: Question, sort: Sort, limit: int, offset: int, first: _Chunk
    ) -> AsyncIterator[Sequence[Row]]:
        """In any other order: which rows there are is settled once, then they are looked up."""
        seqs = first.seqs
        reading = self._statements.seqs(question, limited=limit >= 0, skipping=offset > 0)
        values = {**question.values, "wanted": limit if limit >= 0 else _ALL, "skipped": offset}
        rows, _ = await hot.fetch_bounded(reading, values, CHUNK_BYTES, ())
        found = array("q", (row[0] for row in rows))
        # Since the first chunk, rows may have come and gone, and those whose order can change have moved.
        if (question.listing.table is SPANS or sort.field in _UNCHANGING) and seqs[-1] in found:
            found = found[found.index(seqs[-1]) + 1 :]
        given = set(seqs)
        wanted = array("q", (seq for seq in found if seq not in given))
        if limit >= 0:
            wanted = wanted[: limit - len(given)]
        left: list[int] = []
        begin = 0
        while left or begin < len(wanted):
            end = begin + CHUNK_ROWS - len(left)
            some = left + wanted[begin:end].tolist()
            begin = end
            chunk = await self._chunk(hot, question, self._statements.among(question, some), {"wanted": CHUNK_ROWS})
            given = set(chunk.seqs)
            left = [seq for seq in some if seq not in given] if chunk.cut else []
            if chunk.rows:
                yield chunk.rows


def _is_filtered(filter_: FilterOptions) -> bool:
    conditions = [condition for name, condition in filter_.items() if not name.startswith("_")]
    return any(value is not None for condition in conditions for value in condition.values())

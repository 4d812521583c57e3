"""Pages of the native store: one statement each, long ones in chunks."""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, get_args

from pydantic import BaseModel
from sqlalchemy import (
    ColumnElement,
    Executable,
    FromClause,
    Integer,
    Select,
    Table,
    and_,
    func,
    literal_column,
    select,
    true,
    tuple_,
    union_all,
)

from lightning_sql.collections.sql.conditions import Translation, order_by
from lightning_sql.database.dialects.base import Dialect
from lightning_sql.database.dialects.hot import Row
from lightning_sql.database.native import (
    ATTEMPT_COLUMNS,
    ATTEMPTS,
    ROLLOUT_COLUMNS,
    ROLLOUTS,
    SPAN_COLUMNS,
    SPANS,
    raw_columns,
)
from lightning_sql.database.schema import PARTITION, SEQ
from lightning_sql.errors import InvalidRequestError
from lightning_sql.fields import FieldKind
from lightning_sql.filters import FilterOptions, Sort, SortOptions, normalize_filter, normalize_sort
from lightning_sql.records import Rollout, RolloutStatus, Span
from lightning_sql.store.interface import SortOrder
from lightning_sql.store.row_store import RolloutQuery, RowPage, SpanQuery

__all__ = ["CHUNK_BYTES", "CHUNK_ROWS", "Pages", "check_page"]

CHUNK_ROWS: Final = 1000
"""Most rows that one statement answers."""
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
        self, statement: Executable, most_bytes: int, heavy: Sequence[int]
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
class _Listing:
    """What the pages of one table have in common."""

    table: Table
    item_type: type[BaseModel]
    names: tuple[str, ...]
    payloads: tuple[str, ...]
    keys: tuple[str, ...] = ()
    """Columns that are needed but not answered."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The rows of one statement."""

    rows: list[Row]
    total: int
    cut: bool
    """Whether there would be more rows but for their size."""
    seqs: list[int]
    """The insertion numbers of the rows."""


_ROLLOUTS: Final = _Listing(ROLLOUTS, Rollout, ROLLOUT_COLUMNS, ("input", "metadata"), ("attempt_count",))
_UNCHANGING: Final = ("rollout_id", "start_time")
"""What a rollout keeps; a span keeps everything."""
_SPANS: Final = _Listing(SPANS, Span, SPAN_COLUMNS, ("attributes", "events", "links", "resource", "extra"))


class Pages:
    """The pages of one partition."""

    def __init__(self, dialect: Dialect, partition: str) -> None:
        self._dialect = dialect
        self._partition = partition

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
            statement = statement.limit(2**62)  # SQLite has no OFFSET without LIMIT
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
        where = self._where(ROLLOUTS, Rollout, filter_)
        statuses: Sequence[str] | None = None
        if query.rollout_id_in is None and query.rollout_id_contains is None:
            statuses = _STATUSES if query.status_in is None else sorted(set(query.status_in))
        return await self._page(hot, _ROLLOUTS, where, sort, query.limit, query.offset, query.total, statuses)

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
        where = and_(self._where(SPANS, Span, filter_), SPANS.c.rollout_id == query.rollout_id)
        if query.attempt_id == _LATEST:
            where = and_(where, SPANS.c.attempt_id == self._latest_attempt_id(query.rollout_id))
        elif query.attempt_id is not None:
            where = and_(where, SPANS.c.attempt_id == query.attempt_id)
        return await self._page(hot, _SPANS, where, sort, query.limit, query.offset, query.total)

    def _latest_attempt_id(self, rollout_id: str) -> Any:
        return (
            select(ATTEMPTS.c.attempt_id)
            .where(ATTEMPTS.c[PARTITION] == self._partition, ATTEMPTS.c.rollout_id == rollout_id)
            .order_by(ATTEMPTS.c.sequence_id.desc())
            .limit(1)
            .scalar_subquery()
        )

    async def _page(
        self,
        hot: Fetcher,
        listing: _Listing,
        where: ColumnElement[bool],
        sort: Sort | None,
        limit: int,
        offset: int,
        total: bool,
        statuses: Sequence[str] | None = None,
    ) -> RowPage:
        wanted = CHUNK_ROWS if limit < 0 else min(limit, CHUNK_ROWS)
        chosen = None if statuses is None else self._heads(sort, statuses, wanted, offset)
        # A list without a limit tells how long it is by its end, if it ends here.
        counted = total and limit > 0
        count = select(func.count()).select_from(listing.table).where(where).scalar_subquery()
        chunk = await self._chunk(
            hot, listing, where, sort, wanted, offset, total=count if counted else None, chosen=chosen
        )
        page = RowPage(chunk.rows, None)
        so_far = offset + len(chunk.rows)
        ended = len(chunk.rows) < wanted and not chunk.cut
        if total:
            if counted and chunk.rows:
                page.total = chunk.total
            elif ended and (chunk.rows or not offset):
                page.total = so_far
            else:
                page.total = await self._count(hot, listing.table, where)
        if not ended and len(chunk.rows) != limit and (page.total is None or so_far < page.total):
            page.rest = self._rest(hot, listing, where, sort, limit, offset, chunk)
        return page

    def _heads(self, sort: Sort | None, statuses: Sequence[str], limit: int, offset: int) -> FromClause | None:
        """Which rollouts of some statuses make up a page, from the first ones of each, which an index has in order."""
        if not statuses or sort is None or sort.field != "start_time" or limit + offset > MERGED_ROWS:
            return None
        heads = union_all(
            *(
                select(
                    select(ROLLOUTS.c[SEQ], ROLLOUTS.c.start_time)
                    .where(ROLLOUTS.c[PARTITION] == self._partition, ROLLOUTS.c.status == status)
                    .order_by(*order_by(sort, ROLLOUTS, Rollout))
                    .limit(limit + offset)
                    .subquery()
                )
                for status in statuses
            )
        ).subquery()
        return self._window(select(heads.c[SEQ]).order_by(*order_by(sort, heads, Rollout)), limit, offset).subquery()

    async def _chunk(
        self,
        hot: Fetcher,
        listing: _Listing,
        where: ColumnElement[bool],
        sort: Sort | None,
        limit: int,
        offset: int = 0,
        *,
        total: Any = None,
        chosen: FromClause | None = None,
    ) -> _Chunk:
        """One statement's rows: as many as asked for, or as few as keep within `CHUNK_BYTES`."""
        table = listing.table
        needed = select(*(table.c[name] for name in (SEQ, *listing.names, *listing.keys)))
        if chosen is None:
            ordered = needed.where(where).order_by(*order_by(sort, table, listing.item_type))
            window = self._window(ordered, limit, offset).subquery()
        else:
            # Each is looked up by its key, so nothing more is said of them.
            same = and_(table.c[PARTITION] == self._partition, table.c[SEQ] == chosen.c[SEQ])
            window = needed.select_from(chosen.join(table, same)).subquery()
        measured, up_to, within = self._measured(window, listing, sort)
        columns = raw_columns(measured, listing.names)
        joined: FromClause = measured
        if table is ROLLOUTS:
            joined, columns = self._with_attempts(measured, columns)
        statement = (
            select(literal_column("NULL", Integer()) if total is None else total, up_to, measured.c[SEQ], *columns)
            .select_from(joined)
            .where(within)
            .order_by(*order_by(sort, measured, listing.item_type))
        )
        heavy = [3 + listing.names.index(name) for name in listing.payloads]
        found, stopped = await hot.fetch_bounded(statement, CHUNK_BYTES, heavy)
        if not found:
            return _Chunk([], 0, False, [])
        cut = len(found) < limit and (stopped or (found[-1][1] or 0) >= CHUNK_BYTES)
        return _Chunk([row[3:] for row in found], found[0][0], cut, [row[2] for row in found])

    def _measured(
        self, window: FromClause, listing: _Listing, sort: Sort | None
    ) -> tuple[FromClause, ColumnElement[Any], ColumnElement[bool]]:
        """The rows of a window, how many bytes they have up to each, and that there are not too many before it."""
        sizes = [self._dialect.stored_size(window.c[name]) for name in listing.payloads]
        known = [size for size in sizes if size is not None]
        if not known:
            return window, literal_column("NULL", Integer()), true()
        size = functools.reduce(operator.add, known)
        ordering = order_by(sort, window, listing.item_type)
        running = func.sum(size).over(order_by=ordering, rows=(None, 0))
        measured = select(window, running.label("up_to"), (running - size).label("before")).subquery()
        return measured, measured.c.up_to, measured.c.before < CHUNK_BYTES

    def _with_attempts(
        self, rollouts: FromClause, columns: list[ColumnElement[Any]]
    ) -> tuple[FromClause, list[ColumnElement[Any]]]:
        latest = and_(
            ATTEMPTS.c[PARTITION] == self._partition,
            ATTEMPTS.c.rollout_id == rollouts.c.rollout_id,
            ATTEMPTS.c.sequence_id == rollouts.c.attempt_count,
        )
        named = [
            column.label(f"attempt_{name}")
            for name, column in zip(ATTEMPT_COLUMNS, raw_columns(ATTEMPTS, ATTEMPT_COLUMNS), strict=True)
        ]
        return rollouts.outerjoin(ATTEMPTS, latest), [*columns, *named]

    async def _rest(
        self,
        hot: Fetcher,
        listing: _Listing,
        where: ColumnElement[bool],
        sort: Sort | None,
        limit: int,
        offset: int,
        first: _Chunk,
    ) -> AsyncIterator[Sequence[Row]]:
        """The chunks of a page after the first one."""
        if sort is None or (listing is _SPANS and sort.field == "sequence_id" and not sort.descending):
            left = limit if limit < 0 else limit - len(first.rows)
            chunks = self._by_key(hot, listing, where, sort, left, first)
        else:
            chunks = self._by_list(hot, listing, where, sort, limit, offset, first)
        async for chunk in chunks:
            yield chunk

    async def _by_key(
        self, hot: Fetcher, listing: _Listing, where: ColumnElement[bool], sort: Sort | None, limit: int, last: _Chunk
    ) -> AsyncIterator[Sequence[Row]]:
        """In the order of an index: each chunk begins behind the last row of the one before."""
        table = listing.table
        while limit:
            wanted = CHUNK_ROWS if limit < 0 else min(limit, CHUNK_ROWS)
            behind = table.c[SEQ] > last.seqs[-1]
            if sort is not None:
                place = last.rows[-1][listing.names.index(sort.field)]
                behind = tuple_(table.c[sort.field], table.c[SEQ]) > tuple_(place, last.seqs[-1])
            chunk = await self._chunk(hot, listing, and_(where, behind), sort, wanted)
            if not chunk.rows:
                return
            yield chunk.rows
            if len(chunk.rows) < wanted and not chunk.cut:
                return
            limit -= len(chunk.rows) if limit > 0 else 0
            last = chunk

    async def _by_list(
        self,
        hot: Fetcher,
        listing: _Listing,
        where: ColumnElement[bool],
        sort: Sort,
        limit: int,
        offset: int,
        first: _Chunk,
    ) -> AsyncIterator[Sequence[Row]]:
        """In any other order: which rows there are is settled once, then they are looked up."""
        table = listing.table
        keys = select(table.c[SEQ]).where(where).order_by(*order_by(sort, table, listing.item_type))
        found = array("q", (row[0] for row in await hot.fetch(self._window(keys, limit, offset))))
        # Since the first chunk, rows may have come and gone, and those whose order can change have moved.
        if (listing is _SPANS or sort.field in _UNCHANGING) and first.seqs[-1] in found:
            found = found[found.index(first.seqs[-1]) + 1 :]
        given = set(first.seqs)
        wanted = array("q", (seq for seq in found if seq not in given))
        if limit >= 0:
            wanted = wanted[: limit - len(given)]
        left: list[int] = []
        begin = 0
        while left or begin < len(wanted):
            end = begin + CHUNK_ROWS - len(left)
            some = left + wanted[begin:end].tolist()
            begin = end
            among = self._dialect.within(table.c[SEQ], some, FieldKind.INTEGER)
            chunk = await self._chunk(hot, listing, and_(where, among), sort, CHUNK_ROWS)
            given = set(chunk.seqs)
            left = [seq for seq in some if seq not in given] if chunk.cut else []
            if chunk.rows:
                yield chunk.rows

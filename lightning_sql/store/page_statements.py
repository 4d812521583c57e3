"""The statements of the native store's pages: built once for each question that is asked again and again."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    FromClause,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    case,
    func,
    literal_column,
    select,
    tuple_,
    union_all,
)

from lightning_sql.collections.sql.conditions import order_by
from lightning_sql.database.dialects.base import Dialect
from lightning_sql.database.native import (
    ATTEMPT_COLUMNS,
    ATTEMPTS,
    ROLLOUT_COLUMNS,
    ROLLOUTS,
    SPAN_COLUMNS,
    SPANS,
    SPLICED_SPAN_COLUMNS,
    SPLICES,
    raw_columns,
)
from lightning_sql.database.reading import KeptReading, Reading
from lightning_sql.database.schema import PARTITION, SEQ
from lightning_sql.fields import FieldKind
from lightning_sql.filters import Sort
from lightning_sql.records import Rollout, Span

__all__ = ["ROLLOUT_LISTING", "SPAN_LISTING", "SPLICED_SPAN_LISTING", "Form", "Listing", "PageStatements", "Question"]

_MOST_KEPT: Final = 256
_JSON_NULL: Final = literal_column("'null'", Text())
_NO_VALUE: Final = literal_column("NULL", BigInteger())


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """What the pages of one table have in common.

    Attributes:
        table: what it lists.
        item_type: of which records.
        names: the columns of the table that an answer is made of.
        payloads: those of them that may be large.
        keys: columns that are needed but not answered.
        answered: the columns of an answer: those of the table, or splices of some; None is `names`.
    """

    table: Table
    item_type: type[BaseModel]
    names: tuple[str, ...]
    payloads: tuple[str, ...]
    keys: tuple[str, ...] = ()
    answered: tuple[str, ...] | None = None

    @property
    def heavy(self) -> list[int]:
        """Where payloads stand in an answered row."""
        answered = self.answered or self.names
        return [place for place, name in enumerate(answered) if name in self.payloads or name in SPLICES]

    @property
    def width(self) -> int:
        """How many columns of an answered row are the record's; then come insertion number, size and total."""
        return len(self.answered or self.names) + (len(ATTEMPT_COLUMNS) if self.table is ROLLOUTS else 0)


ROLLOUT_LISTING: Final = Listing(ROLLOUTS, Rollout, ROLLOUT_COLUMNS, ("input", "metadata"), ("attempt_count",))
_SPAN_PAYLOADS: Final = ("attributes", "events", "links", "resource", "extra")
SPAN_LISTING: Final = Listing(SPANS, Span, SPAN_COLUMNS, _SPAN_PAYLOADS)
SPLICED_SPAN_LISTING: Final = Listing(SPANS, Span, SPAN_COLUMNS, _SPAN_PAYLOADS, answered=SPLICED_SPAN_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """What is listed, and in which order, but not from where to where.

    Attributes:
        listing: of which table.
        sort: None keeps the order of insertion.
        where: makes the condition; only asked when the statement is not known yet.
        key: two questions with equal keys have the same condition, but for `values`; None when callers'
            own words are in it, of which there is no end.
        values: what the condition's named parameters are.
        statuses: those that rollouts may have, if nothing else is asked of them.
    """

    listing: Listing
    sort: Sort | None
    where: Callable[[], ColumnElement[bool]]
    key: Hashable | None
    values: Mapping[str, Any]
    statuses: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """Which part of a list a statement answers, and with what.

    It takes as many rows as `wanted` says, and no more of them than have `most_bytes`, unless the dialect
    leaves that to the one who reads them.

    Attributes:
        counted: whether it counts all matches.
        skipping: whether it leaves out the first ones, as many as `skipped` says; `reach` is both.
        behind: whether it begins behind `after_seq` (and `after_place`, the value that is sorted by).
        merged: whether it takes the first rollouts of each status and merges them.
    """

    counted: bool = False
    skipping: bool = False
    behind: bool = False
    merged: bool = False


class PageStatements:
    """The statements of one partition.

    They answer rows of: the columns of the listing and, for rollouts, those of the latest attempt; then the
    insertion number, the size of all rows up to `wanted` in bytes (NULL where it is not known), and the total
    (NULL if it was not asked for).
    """

    def __init__(self, dialect: Dialect, partition: str) -> None:
        self._dialect = dialect
        self._partition = partition
        self._kept: dict[Hashable, Reading] = {}

    def page(self, question: Question, form: Form) -> Reading:
        """The statement that answers part of a question."""
        return self._kept_one(question, form, lambda: self._made(question, form))

    def among(self, question: Question, seqs: Sequence[int]) -> Reading:
        """The statement that answers those of some rows, by insertion number, that still match."""
        chosen = self._dialect.within(question.listing.table.c[SEQ], seqs, FieldKind.INTEGER)
        return Reading(self._made(question, Form(), chosen))

    def total(self, question: Question) -> Reading:
        """The statement that counts all that match."""
        counted = select(func.count()).select_from(question.listing.table)
        return self._kept_one(question, "total", lambda: counted.where(question.where()))

    def seqs(self, question: Question, *, limited: bool, skipping: bool) -> Reading:
        """The statement that answers the insertion numbers of all that match, or of so many, in order."""

        def made() -> Select[Any]:
            table = question.listing.table
            found = select(table.c[SEQ]).where(question.where())
            found = found.order_by(*order_by(question.sort, table, question.listing.item_type))
            # SQLite has no OFFSET without LIMIT.
            return _window(found, Form(skipping=skipping)) if limited or skipping else found

        return self._kept_one(question, ("seqs", limited or skipping, skipping), made)

    def _kept_one(self, question: Question, part: Hashable, make: Callable[[], Select[Any]]) -> Reading:
        if question.key is None:
            return Reading(make())
        key = (question.listing, question.sort, question.statuses, question.key, part)
        reading = self._kept.get(key)
        if reading is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            reading = self._kept[key] = KeptReading(make())
        return reading

    def _made(self, question: Question, form: Form, *conditions: ColumnElement[bool]) -> Select[Any]:
        listing, sort = question.listing, question.sort
        table = listing.table
        where = question.where()
        count = select(func.count()).select_from(table).where(where).scalar_subquery() if form.counted else _NO_VALUE
        if form.behind:
            where = and_(where, self._behind(table, sort))
        source: FromClause = table
        if form.merged and question.statuses is not None:
            heads = self._heads(question.statuses, sort, form)
            # Each is looked up by its key, so nothing more is said of them.
            source = heads.join(table, and_(table.c[PARTITION] == self._partition, table.c[SEQ] == heads.c[SEQ]))
        else:
            conditions = (where, *conditions)
        sizes = [self._dialect.stored_size(table.c[name]) for name in listing.payloads]
        known = [size for size in sizes if size is not None]
        if known:
            return self._bounded(listing, sort, form, source, conditions, count, known)
        columns, joined = self._columns(listing, table, source)
        statement = select(*columns, table.c[SEQ], _NO_VALUE, count).select_from(joined).where(*conditions)
        statement = statement.order_by(*order_by(sort, table, listing.item_type))
        return statement if form.merged else _window(statement, form)

    def _bounded(
        self,
        listing: Listing,
        sort: Sort | None,
        form: Form,
        source: FromClause,
        conditions: Sequence[ColumnElement[bool]],
        count: ColumnElement[Any],
        sizes: Sequence[ColumnElement[int]],
    ) -> Select[Any]:
        """A page that ends where it is heavy enough, which is only looked for when it is too heavy as a whole.

        Rollouts are looked for once, and what is found is kept for the second look, in which their attempts
        are joined. Spans are looked for twice: nearly all of such a page is payloads, and to find them again by
        an index is less than to copy them.
        """
        table = listing.table
        again = table is not ROLLOUTS
        kept = (SEQ, *([] if sort is None else [sort.field])) if again else (SEQ, *listing.names, *listing.keys)
        size = functools.reduce(operator.add, sizes).label("size")
        needed = select(*(table.c[name] for name in dict.fromkeys(kept)), size)
        needed = needed.select_from(source).where(*conditions)
        if not form.merged:
            needed = _window(needed.order_by(*order_by(sort, table, listing.item_type)), form)
        page = needed.cte("page")
        whole = select(func.sum(page.c.size).label("size")).cte("whole")
        weight = select(whole.c.size).scalar_subquery()
        running = func.sum(page.c.size).over(order_by=order_by(sort, page, listing.item_type), rows=(None, 0))
        before = select((running - page.c.size).label("before")).subquery()
        most = bindparam("most_bytes", type_=BigInteger())
        fitting = select(func.count()).select_from(before).where(before.c.before < most).scalar_subquery()
        found: FromClause = table if again else page
        columns, joined = self._columns(listing, found, found)
        answer = select(*columns, found.c[SEQ], weight, count).select_from(joined)
        answer = answer.order_by(*order_by(sort, found, listing.item_type))
        answer = answer.limit(case((weight < most, bindparam("wanted", type_=BigInteger())), else_=fitting))
        if not again:
            return answer
        answer = answer.where(*conditions)
        return answer.offset(bindparam("skipped", type_=BigInteger())) if form.skipping else answer

    def _columns(
        self, listing: Listing, named: FromClause, source: FromClause
    ) -> tuple[list[ColumnElement[Any]], FromClause]:
        columns = [
            self._splice(named, SPLICES[name]) if name in SPLICES else raw_columns(named, [name])[0]
            for name in listing.answered or listing.names
        ]
        if listing.table is not ROLLOUTS:
            return columns, source
        latest = and_(
            ATTEMPTS.c[PARTITION] == self._partition,
            ATTEMPTS.c.rollout_id == named.c.rollout_id,
            ATTEMPTS.c.sequence_id == named.c.attempt_count,
        )
        theirs = [
            column.label(f"attempt_{name}")
            for name, column in zip(ATTEMPT_COLUMNS, raw_columns(ATTEMPTS, ATTEMPT_COLUMNS), strict=True)
        ]
        return [*columns, *theirs], source.outerjoin(ATTEMPTS, latest)

    def _splice(self, named: FromClause, names: Sequence[str]) -> ColumnElement[str]:
        first, *others = [
            func.coalesce(column, _JSON_NULL) if SPANS.c[name].nullable else column
            for name, column in zip(names, raw_columns(named, names), strict=True)
        ]
        parts: list[ColumnElement[str]] = [first]
        for name, column in zip(names[1:], others, strict=True):
            parts += (literal_column(f"',\"{name}\":'", Text()), column)
        return self._dialect.concatenated(parts)

    def _heads(self, statuses: Sequence[str], sort: Sort | None, form: Form) -> FromClause:
        """Which rollouts of some statuses make up a page, from the first ones of each, which an index has in order."""
        each = [
            select(ROLLOUTS.c[SEQ], ROLLOUTS.c.start_time)
            .where(ROLLOUTS.c[PARTITION] == self._partition, ROLLOUTS.c.status == status)
            .order_by(*order_by(sort, ROLLOUTS, Rollout))
            .limit(bindparam("reach" if form.skipping else "wanted", type_=BigInteger()))
            .subquery()
            for status in statuses
        ]
        heads = union_all(*(select(head) for head in each)).subquery()
        merged = select(heads.c[SEQ]).order_by(*order_by(sort, heads, Rollout))
        return _window(merged, form).subquery()

    @staticmethod
    def _behind(table: Table, sort: Sort | None) -> ColumnElement[bool]:
        seq = bindparam("after_seq", type_=table.c[SEQ].type)
        if sort is None:
            return table.c[SEQ] > seq
        place = bindparam("after_place", type_=table.c[sort.field].type)
        return tuple_(table.c[sort.field], table.c[SEQ]) > tuple_(place, seq)


def _window(statement: Select[Any], form: Form) -> Select[Any]:
    statement = statement.limit(bindparam("wanted", type_=BigInteger()))
    return statement.offset(bindparam("skipped", type_=BigInteger())) if form.skipping else statement

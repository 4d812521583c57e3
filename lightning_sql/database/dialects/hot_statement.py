"""Statements for PostgreSQL's driver, and the two forms of one for a batch: of any size, and of one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from sqlalchemy import TextClause, text
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg

__all__ = ["Given", "HotOperation", "HotStatement"]


class HotStatement:
    """A statement that is compiled once and run on the driver's own connection.

    Args:
        name: unique.
        sql: its text.
        single: those of its values that come as lists of one, and are sent without the list.
        joined: those that come as lists, and are sent as one text each.
    """

    def __init__(self, name: str, sql: str, single: Collection[str] = (), joined: Collection[str] = ()) -> None:
        self.name = name
        self.clause: TextClause = text(sql)
        self.single = single
        self.joined = joined

    @cached_property
    def _compiled(self) -> tuple[str, tuple[str, ...]]:
        compiled = self.clause.compile(dialect=PGDialect_asyncpg())
        return compiled.string, tuple(compiled.positiontup or ())

    @cached_property
    def sql(self) -> str:
        """The text that the driver gets."""
        return self._compiled[0]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What the values are called that it takes, in their order."""
        return self._compiled[1]

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        """The values by name, in the order that the text numbers them."""
        if self.joined:
            values = {**values, **_joined({name: values[name] for name in self.joined})}
        if self.single:
            return [values[name][0] if name in self.single else values[name] for name in self.names]
        return [values[name] for name in self.names]


_SEPARATOR: Final = "separator"
_NOTHING: Final = "nothing"


def _joined(lists: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Lists as texts, with what is between their members, and what stands for None: neither is part of a member.

    No text means no members.

    Raises:
        ValueError: a list has one empty text and nothing else, which cannot be given so.
    """
    if any(len(members) == 1 and members[0] == "" for members in lists.values()):
        raise ValueError("a list of one empty text cannot be joined")
    separator, nothing = "\x1f", "\x1e"  # no JSON text has these, and hardly any other
    while True:
        texts = {_SEPARATOR: separator, _NOTHING: nothing}
        for name, members in lists.items():
            joined = separator.join([nothing if m is None else m if type(m) is str else repr(m) for m in members])
            if joined.count(separator) != max(0, len(members) - 1) or joined.count(nothing) != members.count(None):
                break
            texts[name] = joined
        else:
            return texts
        separator, nothing = f"\x1f{secrets.token_hex(8)}\x1f", f"\x1e{secrets.token_hex(8)}\x1e"


class Given:
    """How a statement is given its batch: a list for each column, or only the values, when it is a batch of one.

    A call that is alone is the common one, and without lists it costs the driver and the server a fifth less.
    """

    def __init__(self, *, one: bool) -> None:
        self._one = one
        self.names: set[str] = set()
        self.joined: set[str] = set()

    def _cast(self, name: str, kind: str) -> str:
        self.names.add(name)
        return f"CAST(:{name} AS {kind})" if self._one else f"CAST(:{name} AS {kind}[])"

    def _members(self, name: str, kind: str) -> str:
        self.names.add(name)
        self.joined.add(name)
        members = f"string_to_array(CAST(:{name} AS text), CAST(:{_SEPARATOR} AS text), CAST(:{_NOTHING} AS text))"
        return members if kind == "text" else f"CAST({members} AS {kind}[])"

    def rows(
        self,
        kinds: Mapping[str, str],
        alias: str,
        *columns: str,
        place: str | None = None,
        short: Collection[str] = (),
    ) -> str:
        """The batch as a table `alias`, its columns called as the values are or as `columns` say.

        `place` is what the column is called that numbers the rows from 1. Values of `short` columns travel
        as one text, which the driver has ready much sooner than a list: it asks of each member whether it
        is a list again. A batch must not be empty, nor be of one row, if it has any.
        """
        named = ", ".join((*(columns or kinds), *([] if place is None else [place])))
        given = ", ".join(
            self._members(name, kind) if name in short and not self._one else self._cast(name, kind)
            for name, kind in kinds.items()
        )
        if self._one:
            first = "" if place is None else ", CAST(1 AS bigint)"
            return f"(SELECT {given}{first}) AS {alias} ({named})"
        return f"unnest({given}){'' if place is None else ' WITH ORDINALITY'} AS {alias} ({named})"

    def each(self, name: str, kind: str = "text") -> str:
        """What a column is compared with that is one of the batch's."""
        return f"= {self._cast(name, kind)}" if self._one else f"= ANY ({self._cast(name, kind)})"

    def at(self, name: str, place: str, kind: str = "text") -> str:
        """The value of the row at a place, counted from 1; NULL when that is NULL. It travels as a short one."""
        if self._one:
            return f"CASE WHEN {place} IS NOT NULL THEN {self._cast(name, kind)} END"
        # As a query of its own it is taken apart once, not once a row.
        return f"(SELECT {self._members(name, kind)})[{place}]"


class HotOperation:
    """What is done to a batch by one statement: one for any batch, and one for a batch of one."""

    def __init__(self, name: str, write: Callable[[Given], str]) -> None:
        some, one = Given(one=False), Given(one=True)
        self.some = HotStatement(name, write(some), joined=frozenset(some.joined))
        self.one = HotStatement(f"{name}_of_one", write(one), frozenset(one.names))

    def of(self, count: int) -> HotStatement:
        """The statement for a batch of so many."""
        return self.one if count == 1 else self.some

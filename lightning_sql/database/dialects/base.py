"""What a dialect must know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, Self

from sqlalchemy import ColumnElement, Executable, Table, and_, not_, or_
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine

from lightning_sql.database.payload import ESCAPE_MARK, needle_forms
from lightning_sql.errors import DatabaseUnavailableError
from lightning_sql.fields import FieldKind

if TYPE_CHECKING:
    from lightning_sql.database.dialects.hot import HotPath

__all__ = ["CommitUnknownError", "Dialect", "EnginePair", "Failure", "FileLockedError", "UpsertStatement"]


class CommitUnknownError(DatabaseUnavailableError):
    """The connection broke during a commit: whether the transaction took place is unknown.

    Args:
        token: by which the dialect can find out.
        result: what the transaction answers if it did take place.
    """

    def __init__(self, message: str | None = None, *, token: object = None, result: Any = None) -> None:
        super().__init__(message)
        self.token = token
        self.result = result


class FileLockedError(DatabaseUnavailableError):
    """Another process holds the lock of the database file for long; nothing was done."""


class Failure(Enum):
    """What a database error means to whoever made the call."""

    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    """Lost against a concurrent transaction; running again may succeed."""
    UNAVAILABLE = "unavailable"
    FULL = "full"
    """There is no room for what would be written; the transaction is undone, and the connection as good as before."""
    UNSTORABLE = "unstorable"
    SCHEMA = "schema"
    """A table or column does not exist."""
    REFUSED = "refused"
    """The server does not let us in: unknown database or role, wrong password."""
    OTHER = "other"


class UpsertStatement(Protocol):
    """An INSERT that knows ON CONFLICT; both dialects' own constructs look like this."""

    @property
    def excluded(self) -> Mapping[str, ColumnElement[Any]]:
        """The row that could not be inserted."""
        ...

    def values(self, *args: Any, **kwargs: Any) -> Self:
        """The rows to insert."""
        ...

    def on_conflict_do_update(
        self,
        *,
        index_elements: Sequence[str],
        set_: Mapping[str, Any],
        where: ColumnElement[bool] | None = None,
    ) -> Self:
        """Update the row that is there instead, if it passes `where`."""
        ...

    def returning(self, *columns: Any) -> Any:
        """Answer with columns of the rows that were written."""
        ...


class EnginePair:
    """The engines of one event loop: one that writes, one that only reads; they may be the same."""

    def __init__(self, writer: AsyncEngine, reader: AsyncEngine) -> None:
        self.writer = writer
        self.reader = reader

    async def dispose(self) -> None:
        """Close every connection."""
        await self.writer.dispose()
        if self.reader is not self.writer:
            await self.reader.dispose()


class Dialect(ABC):
    """One database product. Values that it compares are checked and escaped by the column types."""

    name: str
    is_server: bool
    """Whether the database is a process of its own, which can go away and come back."""
    parameters_per_statement: int
    """How many bound values one statement may carry."""

    async def prepare(self, url: URL) -> None:  # noqa: B027 - a server needs nothing
        """Make an empty database ready for its schema.

        Raises:
            ConfigurationError: it cannot be created where the URL says.
        """

    async def back_up(self, url: URL, revision: str) -> bool:  # noqa: ARG002
        """Copy a database that only this machine uses, before it is upgraded from a revision.

        False, and no copy, where others may depend on the old schema.
        """
        return False

    @abstractmethod
    def engines(self, url: URL, *, reflection: bool = False, wait_seconds: float | None = None) -> EnginePair:
        """Fresh engines; nothing is connected yet. With `reflection` they can read the schema instead of payloads.

        A call may wait for `wait_seconds` in all: no statement, and no connecting, takes so long that nothing is left
        of it.
        """

    @abstractmethod
    def hot_path(
        self,
        url: URL,
        engines: EnginePair,
        partition: str,
        *,
        join: bool = True,
        claim_timeout: float | None = None,
        statement_seconds: float | None = None,
    ) -> HotPath:
        """The native store's way to a partition, for the running event loop; connects when first used.

        With `join`, operations may share a commit. `claim_timeout` is how many seconds nothing need be heard of an
        attempt after its claim, None for ever. A hot operation that is not answered within `statement_seconds` fails.
        """

    @abstractmethod
    def transaction_options(self, *, writing: bool, snapshot: bool) -> Mapping[str, Any]:
        """Execution options of a connection about to begin a transaction."""

    @abstractmethod
    def lock(self, keys: Sequence[int]) -> Executable | None:
        """A statement that locks 64-bit keys until the transaction ends, then answers the time; None if needless."""

    @abstractmethod
    def now(self) -> Executable | None:
        """A statement that answers the database's time, in seconds since the epoch; None where ours is as good."""

    @abstractmethod
    def upsert(self, table: Table) -> UpsertStatement:
        """An INSERT into the table that can be given ON CONFLICT."""

    @abstractmethod
    def greatest(self, left: ColumnElement[Any], right: ColumnElement[Any]) -> ColumnElement[Any]:
        """The greater of two numbers, neither of them NULL."""

    @abstractmethod
    def stored_size(self, column: ColumnElement[Any]) -> ColumnElement[int] | None:
        """About how many bytes a text or payload takes, 0 for NULL; None where `fetch_bounded` counts for itself."""

    @abstractmethod
    def concatenated(self, parts: Sequence[ColumnElement[str]]) -> ColumnElement[str]:
        """Texts one after the other, none of them NULL."""

    @abstractmethod
    def position(self, column: ColumnElement[Any], text: str) -> ColumnElement[int]:
        """Where a stored text contains another one, literally and case-sensitively: from 1 on, or 0."""

    def contains(self, column: ColumnElement[Any], needle: str) -> ColumnElement[bool]:
        """Whether a text column contains the needle, whatever the two of them hold."""
        plain, escaped = needle_forms(needle)
        if plain is not None and plain == escaped:
            return self.position(column, plain) > 0
        marked = self.position(column, ESCAPE_MARK) == 1
        in_escaped = and_(marked, self.position(column, escaped) > 0)
        if plain is None:
            return in_escaped
        return or_(in_escaped, and_(not_(marked), self.position(column, plain) > 0))

    @abstractmethod
    def within(self, column: ColumnElement[Any], values: Sequence[Any], kind: FieldKind) -> ColumnElement[bool]:
        """Whether a column is one of any number of values, all of its kind."""

    @abstractmethod
    def failure(self, error: BaseException) -> Failure:
        """Classify an error of the driver by its code."""

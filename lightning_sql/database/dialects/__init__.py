"""The one place that knows that there are two dialects."""

from __future__ import annotations

from sqlalchemy.engine import URL

from lightning_sql.database.dialects.base import Dialect
from lightning_sql.errors import ConfigurationError

__all__ = ["dialect_of"]


def dialect_of(url: URL) -> Dialect:
    """The dialect that a database URL names; its driver is imported only now.

    Raises:
        ConfigurationError: no dialect of ours.
    """
    match url.drivername:
        case "postgresql" | "postgres" | "postgresql+asyncpg":
            from lightning_sql.database.dialects.postgresql import PostgreSQL

            return PostgreSQL()
        case "sqlite" | "sqlite+aiosqlite":
            from lightning_sql.database.dialects.sqlite import SQLite

            return SQLite()
        case other:
            raise ConfigurationError(
                f"the database URL begins with {other!r}; it must be sqlite:///file, postgresql://host/name or memory://"
            )

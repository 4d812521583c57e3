"""What somebody with an SQL prompt sees of the documents that are stored."""

from typing import Any

from lightning_sql.database.native import ATTEMPTS, RESOURCES, ROLLOUTS, SPANS, WORKERS
from lightning_sql.database.types import Payload
from lightning_sql.store.sql_store import SqlStore
from tests.native_laws import rows_of

__all__ = ["is_plain", "members"]


async def members(store: SqlStore, name: str, rollout_id: str | None = None) -> dict[str, list[Any]]:
    """`column ->> name` of every row of every column with JSON, by table and column: one bad row would fail it.

    Args:
        store: it is read in the running event loop.
        name: of a member.
        rollout_id: to look at this rollout, its attempts and its spans only.
    """
    found: dict[str, list[Any]] = {}
    for table in (
        (ROLLOUTS, ATTEMPTS, SPANS) if rollout_id is not None else (ROLLOUTS, ATTEMPTS, SPANS, RESOURCES, WORKERS)
    ):
        for column in table.columns:
            if isinstance(column.type, Payload):
                sql = f"SELECT {column.name} ->> :name FROM {table.name} WHERE partition_id = :partition"
                if rollout_id is None:
                    rows = await rows_of(store, sql, name=name)
                else:
                    rows = await rows_of(store, f"{sql} AND rollout_id = :id", name=name, id=rollout_id)
                found[f"{table.name}.{column.name}"] = [value for (value,) in rows]
    return found


def is_plain(value: Any) -> bool:
    """Whether a value is a string that stands in a document as it is, and as a name is no path or index to SQLite."""
    return isinstance(value, str) and value[:1].isalpha() and all(one.isalnum() or one in " é_%'" for one in value)

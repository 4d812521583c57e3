"""Whether a write took place whose connection broke without a word: the database is asked, nothing is guessed."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any, Final, NamedTuple

from asyncpg.exceptions import InvalidParameterValueError

__all__ = ["BackendSession", "current_transaction", "end_session", "session_of", "took_place"]

_PAUSE_SECONDS: Final = 0.05
_ENDING_SECONDS: Final = 10.0
"""How long a session may take to end that was told to."""

_SESSION: Final = "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
_END: Final = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2"
_TRANSACTION: Final = "SELECT CAST(pg_current_xact_id_if_assigned() AS text)"
_STATUS: Final = "SELECT pg_xact_status(CAST(CAST($1 AS text) AS xid8))"


class BackendSession(NamedTuple):
    """A process of the server; process ids are used again."""

    pid: int
    begun: datetime


async def session_of(driver: Any) -> BackendSession | None:
    """The session of a connection; None behind a pooler, where it is not this connection's alone."""
    row = await driver.fetchrow(_SESSION)
    if row is None or row[0] != driver.get_server_pid():
        return None
    return BackendSession(*row)


async def end_session(driver: Any, session: BackendSession) -> bool:
    """End a session whose client has gone, since it may still be at its statement; whether it is over."""
    deadline = asyncio.get_running_loop().time() + _ENDING_SECONDS
    while await driver.fetch(_END, *session):
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(_PAUSE_SECONDS)
    return True


async def current_transaction(driver: Any) -> str | None:
    """The id of the transaction that a connection is in; None while it has written nothing."""
    return await driver.fetchval(_TRANSACTION)


async def took_place(driver: Any, transaction: str) -> bool | None:
    """Whether a transaction was committed; None while it is still going on, or where the server does not know it."""
    try:
        status = await driver.fetchval(_STATUS, transaction)
    except InvalidParameterValueError:  # another server took over, which never had it
        return None
    return {"committed": True, "aborted": False}.get(status)

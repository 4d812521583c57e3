"""Calls that may be made again: they are done once, and a repeat is answered from what they did.

The key of a call is a row that is written in the same statement or transaction as what the call does. So a
repeat, whichever server it comes to and whether the first is still on its way, fails on that row, does
nothing, and is answered from the ids in it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, overload

from sqlalchemy import select

from lightning_sql.database.dialects.hot import KeyNote
from lightning_sql.database.native import IDEMPOTENCY_KEYS, raw_columns
from lightning_sql.database.payload import decode_text, encode_text
from lightning_sql.database.schema import PARTITION
from lightning_sql.errors import DuplicatedPrimaryKeyError, IdempotencyKeyReusedError
from lightning_sql.records import IdempotencyKey
from lightning_sql.store.interface import KEPT_SECONDS, check_key
from lightning_sql.store.sql_lanes import Lanes

__all__ = ["forget_old_keys", "note_of", "once"]

R = TypeVar("R")

FORGOTTEN_AT_ONCE: Final = 1000
"""How many keys one transaction removes."""


@overload
def note_of(key: IdempotencyKey, part: int = 0) -> KeyNote: ...
@overload
def note_of(key: IdempotencyKey | None, part: int = 0) -> KeyNote | None: ...
def note_of(key: IdempotencyKey | None, part: int = 0) -> KeyNote | None:
    """A key as its row has it.

    Raises:
        InvalidRequestError: it is empty or too long.
    """
    if key is None:
        return None
    check_key(key)
    return KeyNote(encode_text(key.key), encode_text(key.route), encode_text(key.fingerprint), part)


async def once(
    lanes: Lanes,
    note: KeyNote | None,
    call: Callable[[], Awaitable[R]],
    recall: Callable[[Any], Awaitable[R]],
) -> R:
    """Make a call that writes down its note, or answer it from what an earlier one wrote down.

    Args:
        lanes: the way to the database.
        note: the call's key; without one the call is made each time.
        call: makes the call.
        recall: makes the answer of the ids that the earlier call wrote down.

    Raises:
        IdempotencyKeyReusedError: the earlier call was another one.
    """
    try:
        return await call()
    except DuplicatedPrimaryKeyError:
        if note is None:
            raise
        found = await _remembered(lanes, note)
        if found is None:  # it was not the key that stood there twice
            raise
        return await recall(found)


async def _remembered(lanes: Lanes, note: KeyNote) -> Any:
    statement = select(*raw_columns(IDEMPOTENCY_KEYS, ("route", "fingerprint", "ids"))).where(
        IDEMPOTENCY_KEYS.c[PARTITION] == lanes.partition,
        IDEMPOTENCY_KEYS.c.key == decode_text(note.key),
        IDEMPOTENCY_KEYS.c.part == note.part,
    )
    rows = await lanes.fetch(statement)
    if not rows:
        return None
    [(route, fingerprint, ids)] = rows
    if (route, fingerprint) != (note.route, note.fingerprint):
        raise IdempotencyKeyReusedError
    return json.loads(ids)


async def forget_old_keys(lanes: Lanes) -> int:
    """Remove keys that are older than `KEPT_SECONDS`; how many there were."""
    removed = 0
    while count := await lanes.write(lambda transaction: transaction.forget_keys(KEPT_SECONDS, FORGOTTEN_AT_ONCE)):
        removed += count
    return removed

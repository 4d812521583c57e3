"""Walking JSON values without recursion: how deep a payload may be must not depend on the caller's stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel

from lightning_sql.errors import UnstorableValueError

__all__ = ["NESTING_LIMIT", "TOO_DEEP", "copied", "deeper_than", "rebuilt"]

M = TypeVar("M", bound=BaseModel)

NESTING_LIMIT: Final = 500
"""Deepest nesting of lists and objects in a payload."""

TOO_DEEP: Final = f"the payload is nested deeper than {NESTING_LIMIT} levels"


def _same(name: str) -> str:
    return name


def rebuilt(
    value: Any, leaf: Callable[[Any], Any], name: Callable[[str], str] = _same, *, limit: int = NESTING_LIMIT
) -> Any:
    """A copy of a JSON value with every leaf, and every name of a member, replaced; tuples become lists.

    Raises:
        UnstorableValueError: it is nested deeper than `limit` levels.
    """
    result: list[Any] = [None]
    pending: list[tuple[Any, Any, Any, int]] = [(value, result, 0, 0)]
    while pending:
        source, target, place, depth = pending.pop()
        if not isinstance(source, dict | list | tuple):
            target[place] = leaf(source)
            continue
        if depth >= limit:
            raise UnstorableValueError(TOO_DEEP)
        if isinstance(source, dict):
            members = [(name(k) if isinstance(k, str) else k, v) for k, v in cast(dict[Any, Any], source).items()]
            target[place] = built = dict.fromkeys(k for k, _ in members)
        else:
            members = list(enumerate(cast(list[Any], source)))
            target[place] = built = [None] * len(members)
        pending.extend((item, built, k, depth + 1) for k, item in members)
    return result[0]


def deeper_than(value: Any, limit: int) -> bool:
    """Whether lists and objects nest more than `limit` levels deep in a JSON value."""
    level: list[Any] = [value]
    for _ in range(limit):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(cast(dict[str, Any], item).values())
            elif isinstance(item, list):
                below.extend(cast(list[Any], item))
        level = [item for item in below if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _is_shared(value: Any) -> bool:
    return isinstance(value, dict | list | tuple | BaseModel)


def _copied_leaf(value: Any) -> Any:
    return copied(value) if isinstance(value, BaseModel) else value


def copied(item: M) -> M:
    """A deep copy of a record.

    Raises:
        UnstorableValueError: a payload of it is nested too deep.
    """
    return item.model_copy(update={name: rebuilt(value, _copied_leaf) for name, value in item if _is_shared(value)})

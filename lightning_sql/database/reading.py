"""Statements that read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

from sqlalchemy import BindParameter, Executable
from sqlalchemy.engine import Dialect

__all__ = ["KeptReading", "Reading"]

_Process: TypeAlias = Callable[[Any], Any]


class _Argument(NamedTuple):
    """A value of a statement: one that is given each time by its name, or always the same one."""

    name: str | None
    value: Any
    process: _Process


class Reading:
    """A statement that reads, with values that are given when it is asked.

    Args:
        statement: its columns must have types that need no decoding; what is given each time is a
            `bindparam()` with a name of its own.
    """

    def __init__(self, statement: Executable) -> None:
        self.statement = statement


class KeptReading(Reading):
    """A statement that is asked again and again.

    It is compiled once, when first asked, and goes to the driver as text: to build it anew, and to find out
    that it is an old acquaintance, takes longer than many an answer.
    """

    def __init__(self, statement: Executable) -> None:
        super().__init__(statement)
        self._compiled: tuple[str, tuple[_Argument, ...]] | None = None

    def on(self, dialect: Dialect, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """The text for the driver of a dialect, always the same one, and its arguments.

        Raises:
            UnstorableValueError: no column could hold a value.
            KeyError: a value is missing.
        """
        compiled = self._compiled
        if compiled is None:
            compiled = self._compiled = _compiled(self.statement, dialect)
        sql, arguments = compiled
        return sql, [
            argument.value if argument.name is None else argument.process(values[argument.name])
            for argument in arguments
        ]


def _as_it_is(value: Any) -> Any:
    return value


def _compiled(statement: Executable, dialect: Dialect) -> tuple[str, tuple[_Argument, ...]]:
    compiled = cast(Any, statement).compile(dialect=dialect)
    arguments: list[_Argument] = []
    for name in cast("list[str]", compiled.positiontup or []):
        bind: BindParameter[Any] = compiled.binds[name]
        process = cast("_Process | None", bind.type.bind_processor(dialect)) or _as_it_is
        if bind.required:
            arguments.append(_Argument(name, None, process))
        else:
            arguments.append(_Argument(None, process(compiled.params[name]), process))
    return compiled.string, tuple(arguments)

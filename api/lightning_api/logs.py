"""What the service logs, and what it keeps to itself.

Errors of a database driver, and of what validates records, repeat the values that they are about; so
their texts are never logged, only what kind of error it was and where it came from.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, cast

from typing_extensions import override

__all__ = ["SafeFormatter", "configure_logging", "described", "log_lost_error"]

logger: Final = logging.getLogger(__name__)

_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OWN: Final = ("lightning_api", "lightning_sql")
_DISCREET: Final = ("alembic", "asyncio", "uvicorn")
"""Libraries that say nothing of what is stored; all others are not heard below a warning."""
_SPEAKING: Final = frozenset({*_OWN, "asyncio", "builtins", "litestar", "socket", "ssl", "uvicorn"})
"""Packages whose errors say what went wrong without repeating what somebody sent or stored."""
_HARMLESS: Final = ("sqlstate", "sqlite_errorname", "schema_name", "table_name", "column_name", "constraint_name")
"""Attributes of drivers' errors that only name parts of the schema."""
_WITHHELD: Final = "(its text may hold what was sent or stored, and is not logged)"


def described(error: BaseException) -> str:
    """An exception with what caused it, as a traceback without anything that somebody sent or stored."""
    return "".join(_lines(error, set())).rstrip("\n")


def _lines(error: BaseException, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    cause, context = error.__cause__, error.__context__
    if cause is not None and id(cause) not in seen:
        yield from _lines(cause, seen)
        yield "\nThis was the direct cause of:\n\n"
    elif context is not None and not error.__suppress_context__ and id(context) not in seen:
        yield from _lines(context, seen)
        yield "\nWhile this was handled came:\n\n"
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):\n"
        yield from traceback.format_tb(error.__traceback__)
    yield f"{_named(error)}\n"
    if isinstance(error, BaseExceptionGroup):
        for part in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            if id(part) not in seen:
                yield "\nOne of them:\n\n"
                yield from _lines(part, seen)


def _named(error: BaseException) -> str:
    kind = type(error)
    package = kind.__module__.partition(".")[0]
    name = kind.__qualname__ if package == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if package in _SPEAKING:
        text = str(error)
        return f"{name}: {text}" if text else name
    about = {attribute: getattr(error, attribute, None) for attribute in _HARMLESS}
    known = [f"{attribute}={value}" for attribute, value in about.items() if isinstance(value, str)]
    return " ".join([f"{name}:", *known, _WITHHELD])


class SafeFormatter(logging.Formatter):
    """Formats log records, with exceptions as `described` tells them."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        """A record as it is logged."""
        # A handler that came first left the whole text in it.
        record = copy.copy(record)
        record.exc_text = None
        return super().format(record)

    @override
    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        """An exception as it may be logged."""
        return "" if ei[1] is None else described(ei[1])


def configure_logging(level: int) -> None:
    """Log to standard error; libraries only have their warnings heard, and no more than is good to know."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SafeFormatter(_FORMAT))
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
    for package in _OWN:
        logging.getLogger(package).setLevel(level)
    for package in _DISCREET:
        logging.getLogger(package).setLevel(level if level == logging.DEBUG else max(level, logging.WARNING))


def log_lost_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An event loop's handler of errors that nobody waits for: its own would repeat the error's text."""
    error = context.get("exception")
    logger.error("%s", context["message"], exc_info=error if isinstance(error, BaseException) else None)

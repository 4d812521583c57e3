"""From exceptions to answers: the only place that decides what a caller learns of a failure."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, cast

from litestar.exceptions import HTTPException
from pydantic import ValidationError

from lightning_api.payloads import MalformedJsonError, UndecodableBodyError, encode_json
from lightning_api.replies import Headers, Reply
from lightning_sql.errors import (
    DatabaseFullError,
    DatabaseUnavailableError,
    IdempotencyKeyReusedError,
    InvalidRequestError,
    OverloadedError,
    RecordNotFoundError,
    UnstorableValueError,
)

__all__ = [
    "NOT_JSON",
    "BodyTooLargeError",
    "InvalidPartError",
    "failure",
    "failure_of",
    "problem",
    "problem_of",
    "rejection",
    "reply_to_error",
    "status_and_reason",
]

logger: Final = logging.getLogger(__name__)

_OWN_ROUTES: Final = "/v1/lightning/"
"""Where the routes are that are not the protocol's; failures there are problem details."""

_ECHO_TEXT: Final = 200
_ECHO_ITEMS: Final = 20
_ECHO_DEPTH: Final = 4
_LISTED_ERRORS: Final = 100
_SECRET: Final = re.compile(r"key|auth|passw|secret|token|credential", re.IGNORECASE)
_REDACTED: Final = "[redacted]"
_WITHHELD: Final = "…"
_WORD: Final = re.compile(r"[a-z_]{1,32}")

NOT_JSON: Final = "(a body that is not declared as JSON)"
"""What stands for such a body."""


class BodyTooLargeError(Exception):
    """A request body is larger than the service accepts, as sent or once decompressed."""


class InvalidPartError(Exception):
    """A part of a request does not fit its schema.

    Args:
        part: `body`, `query` or `path`.
        errors: as pydantic lists them.
    """

    def __init__(self, part: str, errors: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(f"the {part} does not fit its schema")
        self.details = [_detail(part, error) for error in errors[:_LISTED_ERRORS]]

    @classmethod
    def of(cls, part: str, error: ValidationError) -> InvalidPartError:
        """The same problem, as it is told to the caller."""
        return cls(part, error.errors(include_url=False))


def rejection(error: ValidationError) -> str:
    """The first problem of a record, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(step) for step in first["loc"])
    reason: str = _bounded(f"{place}: {first['msg']}" if place else first["msg"])
    return reason


def _detail(part: str, error: Mapping[str, Any]) -> dict[str, Any]:
    kind, context, message = error["type"], error.get("ctx"), error["msg"]
    location = [part, *error["loc"]]
    if kind == "union_tag_invalid" and context is not None and not _WORD.fullmatch(str(context["tag"])):
        # The only kind that repeats what was sent in its message.
        context, message = {**context, "tag": _WITHHELD}, message.replace(str(context["tag"]), _WITHHELD, 1)
    secret = any(isinstance(step, str) and _SECRET.search(step) for step in location)
    value = error.get("input")
    # A word that is none of those that there are may be told; of other texts nobody knows what they are.
    word = kind == "literal_error" and isinstance(value, str) and _WORD.fullmatch(value)
    told = part != "body" or bool(word)
    detail: dict[str, Any] = {
        "type": kind,
        "loc": [_bounded(step) for step in location],
        "msg": _bounded(message),
        "input": _REDACTED if secret else value if value is NOT_JSON else _bounded(value, told=told),
    }
    if context is not None:
        detail["ctx"] = _bounded(context)
    return detail


def _bounded(value: Any, depth: int = _ECHO_DEPTH, *, told: bool = True) -> Any:
    """A value small enough to be sent back, without secrets; without texts if they must not be `told`."""
    if isinstance(value, str):
        return _WITHHELD if not told else value if len(value) <= _ECHO_TEXT else value[:_ECHO_TEXT] + _WITHHELD
    if isinstance(value, int) and value.bit_length() > 256:
        return "(a long integer)"
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth and isinstance(value, Mapping):
        entries = list(cast(Mapping[Any, Any], value).items())[:_ECHO_ITEMS]
        return {
            _bounded(str(key)): _REDACTED if _SECRET.search(str(key)) else _bounded(item, depth - 1, told=told)
            for key, item in entries
        }
    if depth and isinstance(value, list | tuple):
        return [_bounded(item, depth - 1, told=told) for item in cast(Sequence[Any], value)[:_ECHO_ITEMS]]
    return _WITHHELD if isinstance(value, Mapping | list | tuple) else _bounded(str(value), told=told)


def status_and_reason(error: Exception) -> tuple[int, str]:
    """The status and the one-line reason of a failure, for every error but the 422s with a list of details."""
    match error:
        case RecordNotFoundError():
            return 404, str(error)
        case UnstorableValueError() | IdempotencyKeyReusedError():
            return 422, str(error)
        case InvalidRequestError():
            return 400, str(error)
        case UndecodableBodyError():
            return 400, "There was an error parsing the body"
        case BodyTooLargeError():
            return 413, "The body is too large"
        case OverloadedError():  # one line for each would make it worse
            return 503, "Too many calls wait already; try again"
        case DatabaseFullError():
            logger.warning("answered 503: %s", error)
            return 503, "The database has no room left, so that nothing was stored; try again when there is room"
        case DatabaseUnavailableError():
            logger.warning("answered 503: %s", error)
            return 503, "The database is not available; try again"
        case HTTPException() if error.status_code < 500:
            return error.status_code, error.detail
        case _:
            logger.error("answered 500", exc_info=error)
            return 500, "Internal server error"


def reply_to_error(error: Exception) -> Reply:
    """The answer to a failure, as FastAPI would give it where FastAPI decides (CONTRACT.md section 4)."""
    if isinstance(error, InvalidPartError):
        return Reply.json(422, {"detail": error.details})
    if isinstance(error, MalformedJsonError):
        return Reply.json(422, {"detail": [_malformed(error)]})
    if isinstance(error, IdempotencyKeyReusedError):
        return Reply.json(422, {"detail": [_reused(error)]})
    status, reason = status_and_reason(error)
    content: dict[str, Any] = {"detail": reason}
    headers: dict[str, str] = {}
    match status:
        case 404 if isinstance(error, RecordNotFoundError):
            content["error_type"] = "ValueError"
        case 405 if isinstance(error, HTTPException):
            headers["allow"] = _allowed(error)
        case 422:
            content["detail"] = [{"type": "value_error", "loc": ["body"], "msg": reason, "input": None}]
        case 500:
            content["error_type"] = type(error).__name__
        case 503:
            headers["retry-after"] = "1"
        case _:
            pass
    return Reply.json(status, content, headers)


def _reused(error: IdempotencyKeyReusedError) -> dict[str, Any]:
    return {
        "type": "idempotency_key_reused",
        "loc": ["header", "idempotency-key"],
        "msg": str(error),
        "input": None,
    }


def _malformed(error: MalformedJsonError) -> dict[str, Any]:
    return {
        "type": "json_invalid",
        "loc": ["body", error.position],
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": error.reason},
    }


def _allowed(error: HTTPException) -> str:
    methods = (error.headers or {}).get("allow", "").split(", ")
    return ", ".join(sorted(method for method in methods if method != "OPTIONS"))


def problem(status: int, detail: str, *, errors: Sequence[Any] | None = None) -> Reply:
    """A failure as problem details (RFC 9457), with what is wrong with the request in `errors`."""
    content: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
    }
    if errors is not None:
        content["errors"] = errors
    retry = ((b"retry-after", b"1"),) if status == 503 else ()
    return Reply(status, encode_json(content), ((b"content-type", b"application/problem+json"), *retry))


def problem_of(error: Exception) -> Reply:
    """The answer to a failure on the routes that are not the protocol's."""
    if isinstance(error, InvalidPartError):
        return problem(422, str(error), errors=error.details)
    if isinstance(error, MalformedJsonError):
        return problem(422, f"the body cannot be read as JSON: {error.reason}", errors=[_malformed(error)])
    if isinstance(error, IdempotencyKeyReusedError):
        return problem(422, str(error), errors=[_reused(error)])
    status, reason = status_and_reason(error)
    reply = problem(status, reason)
    if status == 405 and isinstance(error, HTTPException):
        reply.headers += ((b"allow", _allowed(error).encode()),)
    return reply


def failure(path: str, status: int, detail: str, headers: Headers = ()) -> Reply:
    """A failure for which no operation answers, in the form that the routes around the path have."""
    reply = problem(status, detail) if _is_own(path) else Reply.json(status, {"detail": detail})
    reply.headers += headers
    return reply


def failure_of(path: str, error: Exception) -> Reply:
    """As `failure`, for an exception."""
    return problem_of(error) if _is_own(path) else reply_to_error(error)


def _is_own(path: str) -> bool:
    return f"{path}/".startswith(_OWN_ROUTES)

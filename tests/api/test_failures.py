"""No traceback, no SQL, no path and no word of a driver leaves the server, whatever goes wrong on whichever route."""

import re
import sqlite3
from typing import Any

import pytest
from asyncpg.exceptions import UniqueViolationError
from google.rpc.status_pb2 import Status
from litestar.exceptions import InternalServerException
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from sqlalchemy.exc import OperationalError

from lightning_api.documentation import documentation_of
from lightning_api.routes import OPERATIONS
from lightning_api.settings import Settings
from lightning_sql.errors import (
    ConfigurationError,
    DatabaseUnavailableError,
    DuplicatedPrimaryKeyError,
    LightningError,
    OverloadedError,
    SchemaOutdatedError,
    TransactionConflictError,
)
from tests.api.fakes import PagesOfSpans, span_row
from tests.api.test_errors import CALLS, SECRET, FailingStore, span
from tests.api.test_streaming import Connection

TEXT = f"SELECT '{SECRET}' FROM /srv/{SECRET}.db failed for postgresql://user:{SECRET}@db"
"""What no caller may see any part of."""
PARTS = (SECRET, "SELECT", "/srv/", "postgresql://", "Traceback", 'File "', "site-packages", "DETAIL")

PROTOBUF = "application/x-protobuf"


def export() -> bytes:
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    for name in ("rollout_id", "attempt_id"):
        pair = KeyValue(key=f"agentlightning.{name}", value=AnyValue(string_value="x"))
        resource.resource.attributes.append(pair)
    resource.scope_spans.add().spans.add(trace_id=b"t" * 16, span_id=b"s" * 8, name="n")
    return request.SerializeToString()


MORE: list[tuple[str, str, Any]] = [
    ("GET", "/v1/lightning/rollouts", None),
    ("GET", "/v1/lightning/rollouts?total=false", None),
    ("GET", "/v1/lightning/spans?rollout_id=r", None),
    ("POST", "/v1/lightning/spans", {"spans": [span()]}),
    ("GET", "/readyz", None),
    ("POST", "/v1/traces", export()),
]
NOT_OF_THE_STORE = {
    "health",
    "healthz",
    "schema",
    "schema_json",
    "export_metrics",
    "export_logs",
    "export_profiles",
} | {"call_together"}
"""Operations that ask no store."""


class FailingRows:
    """Rows whose every call fails in the same way."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        async def fail(*arguments: Any, **options: Any) -> Any:
            raise self._error

        return fail


class FailingStoreOfRows(FailingStore):
    """A store with lean ways, all of which fail."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.rows = FailingRows(error)


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


FAILURES: list[Exception] = [
    RuntimeError(TEXT),
    KeyError(TEXT),
    AttributeError(TEXT),
    AssertionError(TEXT),
    RecursionError(TEXT),
    MemoryError(TEXT),
    OSError(2, TEXT, f"/srv/{SECRET}"),
    UnicodeDecodeError("utf-8", TEXT.encode(), 0, 1, TEXT),
    sqlite3.OperationalError(TEXT),
    UniqueViolationError(TEXT),
    OperationalError(TEXT, {"payload": SECRET}, sqlite3.OperationalError(TEXT)),
    ExceptionGroup(TEXT, [RuntimeError(TEXT)]),
    InternalServerException(TEXT),
    ConfigurationError(TEXT),
    SchemaOutdatedError(TEXT),
    DuplicatedPrimaryKeyError(TEXT),
    LightningError(TEXT),
    DatabaseUnavailableError(TEXT),
    OverloadedError(TEXT),
    TransactionConflictError(TEXT),
    chained(DatabaseUnavailableError(), UniqueViolationError(TEXT)),
]


def test_every_operation_is_called() -> None:
    operations = (*OPERATIONS, *documentation_of(OPERATIONS, Settings()))
    patterns = {
        operation.name: (operation.method, re.compile(re.sub(r"{\w+}", "[^/?]+", operation.path) + r"(\?.*)?"))
        for operation in operations
    }
    called = {
        name
        for name, (method, pattern) in patterns.items()
        if any(called_method == method and pattern.fullmatch(path) for called_method, path, _ in [*CALLS, *MORE])
    }
    assert called | NOT_OF_THE_STORE == patterns.keys()


@pytest.mark.parametrize("store_type", [FailingStore, FailingStoreOfRows])
@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
async def test_nothing_of_a_failure_is_told(serve: Any, store_type: Any, error: Exception) -> None:
    client = await serve(store=store_type(error))
    unavailable = isinstance(error, DatabaseUnavailableError)
    for method, path, body in [*CALLS, *MORE]:
        raw = isinstance(body, bytes)
        content = {"content": body, "headers": {"content-type": PROTOBUF}} if raw else {"json": body}
        answer = await client.request(method, path, **content)
        assert (path, answer.status_code) == (path, 503 if unavailable or told_by_readyz(path, error) else 500)
        shown = answer.content.decode("latin-1") + repr(answer.headers)
        for part in PARTS:
            assert part not in shown, path
        if raw:
            told = Status.FromString(answer.content)
            assert told.message in ("Internal server error", *UNAVAILABLE)
        elif path.startswith("/v1/lightning/"):
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["detail"] in ("Internal server error", *UNAVAILABLE)
        elif path != "/readyz":
            assert answer.json()["detail"] in ("Internal server error", *UNAVAILABLE)


UNAVAILABLE = ("The database is not available; try again", "Too many calls wait already; try again")


def told_by_readyz(path: str, error: Exception) -> bool:
    return path == "/readyz" and isinstance(error, LightningError)


async def test_nothing_of_a_failure_is_told_half_way() -> None:
    """The answer ends where it failed: what was sent before is all that the caller gets."""
    connection = Connection(PagesOfSpans([[span_row(1)], [span_row(2)]], RuntimeError(TEXT)))
    for _ in range(10):
        connection.may_send.release()
    await connection.serve()
    _, *parts = connection.sent
    body = b"".join(part["body"] for part in parts).decode()
    assert '"s2"' in body
    assert parts[-1]["more_body"]
    for part in PARTS:
        assert part not in body

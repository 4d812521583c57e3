"""OTLP/HTTP: traces are taken, the other signals are not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

from lightning_api import otlp
from lightning_api.calls import Call
from lightning_api.errors import status_and_reason
from lightning_api.operations import Nothing, Operation, operation
from lightning_api.replies import Reply
from lightning_sql.store import documents
from lightning_sql.store.documents import SpanOutcome

__all__ = ["OPERATIONS"]

S = TypeVar("S")

logger: Final = logging.getLogger(__name__)

_PROTOBUF: Final = (b"content-type", otlp.CONTENT_TYPE.encode())
_GZIPPED: Final = (b"content-encoding", b"gzip")

_INLINE_BYTES: Final = 256 * 1024


def _reply(call: Call, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> Reply:
    if otlp.gzip_wanted(call.header(b"accept-encoding") or b""):
        return Reply(status, otlp.compress(body), (_PROTOBUF, _GZIPPED, *headers))
    return Reply(status, body, (_PROTOBUF, *headers))


def _reply_to_error(call: Call, error: Exception) -> Reply:
    if isinstance(error, otlp.MalformedExportError):
        status, reason = 400, str(error)
    else:
        status, reason = status_and_reason(error)
    retry = ((b"retry-after", b"1"),) if status == 503 else ()
    return _reply(call, status, otlp.encode_status(status, reason), *retry)


async def _read(call: Call, decode: Callable[[bytes], otlp.Export[S]]) -> otlp.Export[S]:
    content_type = (call.header(b"content-type") or b"").partition(b";")[0].strip().lower().decode("latin-1")
    if content_type != otlp.CONTENT_TYPE:
        raise otlp.MalformedExportError(f"the content type must be {otlp.CONTENT_TYPE}")
    body = await call.body()
    coding = (call.header(b"content-encoding") or b"identity").strip().lower()
    if coding not in (b"identity", b"gzip"):
        raise otlp.MalformedExportError("the content encoding must be gzip, or none")
    if coding == b"identity" and len(body) <= _INLINE_BYTES:
        return decode(body)
    # What unpacks or converts much does so beside the event loop, which others wait for.
    if coding == b"gzip":
        body = await asyncio.to_thread(otlp.decompress, body, call.service.settings.body_limit)
        call.hold(len(body))
    return await asyncio.to_thread(decode, body)


async def _import(call: Call) -> tuple[otlp.Export[Any], list[str]]:
    """What an export holds, and why spans of it were not stored."""
    rows = call.store.rows
    if rows is not None:
        drafts = await _read(call, otlp.decode_export_rows)
        if not drafts.spans:
            return drafts, drafts.rejected
        stored, outcomes = await rows.import_span_rows(drafts.spans, drafts.unnumbered)
        unknown = [
            documents.unknown_attempt(span)
            for span, outcome in zip(stored, outcomes, strict=True)
            if outcome is SpanOutcome.UNKNOWN
        ]
        return drafts, drafts.rejected + unknown
    export = await _read(call, otlp.decode_export)
    if not export.spans:
        return export, export.rejected
    receipt = await call.store.import_spans(export.spans, unnumbered=export.unnumbered)
    return export, export.rejected + [documents.unknown_attempt(span) for span in receipt.rejected]


@operation(
    "POST",
    "/v1/traces",
    Nothing(),
    errors=(503,),
    tag="otlp",
    to_error=_reply_to_error,
    media_type=otlp.CONTENT_TYPE,
    hot=True,
)
async def export_traces(call: Call, _nothing: None) -> Reply:
    """Store the spans of an OTLP export; those of unknown attempts are reported as a partial success."""
    export, reasons = await _import(call)
    if export.unroutable:
        logger.info("skipped %d spans that name no rollout and attempt", export.unroutable)
    return _reply(call, 200, otlp.encode_response(len(reasons), reasons))


async def _not_implemented(_call: Call, _nothing: None) -> Reply:
    return Reply(501)


def _refused(name: str, path: str, signal: str) -> Operation:
    return Operation(
        name=name,
        method="POST",
        path=path,
        source=Nothing(),
        handler=_not_implemented,
        summary=f"Refuse {signal}: the store takes traces only.",
        status=501,
        tag="otlp",
    )


OPERATIONS: Final[tuple[Operation, ...]] = (
    export_traces,
    _refused("export_metrics", "/v1/metrics", "metrics"),
    _refused("export_logs", "/v1/logs", "logs"),
    _refused("export_profiles", "/v1/development/profiles", "profiles"),
)

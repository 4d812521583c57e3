"""An exporter of the OpenTelemetry SDK that stores spans in a service. Needs `opentelemetry-sdk`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from typing_extensions import override

from lightning_api.client import LightningClient
from lightning_api.otlp import ATTEMPT_ID, ROLLOUT_ID, SEQUENCE_ID
from lightning_sql.errors import LightningError
from lightning_sql.otel import span_from_sdk
from lightning_sql.records import Span
from lightning_sql.store.threaded import threaded

__all__ = ["LightningSpanExporter"]

logger: Final = logging.getLogger(__name__)

_MORE_SECONDS: Final = 60.0
"""How much longer than a call is made again one export may take."""


class LightningSpanExporter(SpanExporter):
    """Stores spans that have ended, those of one export in one request.

    A span belongs to the attempt that its resource names (`agentlightning.rollout_id`, `agentlightning.attempt_id`),
    else to the one that the exporter is for. Without `agentlightning.span_sequence_id` it gets the next number of its
    rollout. May be used from any thread and after a fork, with any of the SDK's processors.

    Args:
        base_url: `http://host:port`, without `/v1`.
        rollout_id: of spans whose resource names none.
        attempt_id: likewise.
        token: the bearer token, if the service asks for one.
        retry_seconds: how long an export is made again while the service is away.
    """

    def __init__(
        self,
        base_url: str,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        token: str | None = None,
        retry_seconds: float = 90.0,
    ) -> None:
        self._attempt = rollout_id, attempt_id
        self._seconds = retry_seconds + _MORE_SECONDS
        self._store = threaded(lambda: LightningClient(base_url, token=token, retry_seconds=retry_seconds), forks=True)
        self._shut = False

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Store spans; what no attempt is known of is left out, and the log says so.

        After `shutdown` it is a failure, and before the end of one that is under way it may be.
        """
        if self._shut:
            logger.warning("%d spans are not stored: the exporter was shut down", len(spans))
            return SpanExportResult.FAILURE
        records: list[Span] = []
        unnumbered: set[int] = set()
        for span in spans:
            attributes = span.resource.attributes
            rollout_id = attributes.get(ROLLOUT_ID, self._attempt[0])
            attempt_id = attributes.get(ATTEMPT_ID, self._attempt[1])
            number = attributes.get(SEQUENCE_ID)
            if not isinstance(rollout_id, str) or not isinstance(attempt_id, str):
                logger.warning("the span %r names no rollout and attempt, and is not stored", span.name)
                continue
            if not isinstance(number, int):
                unnumbered.add(len(records))
            records.append(span_from_sdk(span, rollout_id, attempt_id, number if isinstance(number, int) else 0))
        try:
            receipt = self._store.call_blocking(self._seconds, "import_spans", records, unnumbered=unnumbered)
        except (LightningError, TimeoutError) as error:
            logger.warning("%d spans could not be stored: %s", len(records), error)
            return SpanExportResult.FAILURE
        for span in receipt.rejected:
            logger.warning("the span %r is of an attempt that does not exist, and is not stored", span.name)
        return SpanExportResult.SUCCESS

    @override
    def shutdown(self) -> None:
        """Close the connections."""
        self._shut = True
        self._store.close_blocking(self._seconds)

    @override
    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing waits here: an export returns when its spans are stored."""
        return True

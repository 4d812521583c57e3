"""Rows as a database gives them."""

from collections.abc import Sequence
from typing import Any

from lightning_sql.database.dialects.hot import SpanDraft

__all__ = ["spliced_row"]


def spliced_row(draft: SpanDraft) -> Sequence[Any]:
    """The row of a span that is only to be written (`SPLICED_SPAN_COLUMNS`)."""
    payloads = f'{draft.status},"attributes":{draft.attributes},"events":{draft.events},"links":{draft.links}'
    origin = f'{draft.context or "null"},"parent":{draft.parent or "null"},"resource":{draft.resource}'
    return *draft[:7], payloads, draft.start_time, draft.end_time, origin, draft.extra

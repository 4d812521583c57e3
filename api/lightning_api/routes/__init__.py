"""The routes, by what they are about."""

from __future__ import annotations

from typing import Final

from lightning_api.operations import Operation
from lightning_api.routes import (
    attempts,
    bulk,
    health,
    listings,
    otlp,
    queues,
    resources,
    rollouts,
    spans,
    together,
    waits,
    workers,
)

__all__ = ["OPERATIONS"]

OPERATIONS: Final[tuple[Operation, ...]] = (
    *health.OPERATIONS,
    *queues.OPERATIONS,
    *rollouts.OPERATIONS,
    *attempts.OPERATIONS,
    *spans.OPERATIONS,
    *resources.OPERATIONS,
    *workers.OPERATIONS,
    *waits.OPERATIONS,
    *otlp.OPERATIONS,
    *bulk.OPERATIONS,
    *listings.OPERATIONS,
    *together.OPERATIONS,
)
"""Every operation of the service."""

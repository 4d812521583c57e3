"""Looking at the queue, the database and the process every few seconds, so that no scrape has to."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from lightning_api.calls import Service
from lightning_api.counting import OTHER
from lightning_sql.collections.tracking import store_method
from lightning_sql.errors import LightningError
from lightning_sql.metrics import (
    CALLS_IN_FLIGHT,
    CALLS_WAITING,
    DATABASE_LATENCY,
    DEADLINES_DUE,
    HTTP_CALLS,
    POOL_CONNECTIONS,
    QUEUE_DEPTH,
    QUEUE_OLDEST,
    RUNNING_ATTEMPTS,
    SAMPLED_TIME,
    Recorder,
)
from lightning_sql.store.interface import LightningStore

__all__ = ["sample_process", "sample_regularly", "sample_store"]

logger: Final = logging.getLogger(__name__)

SAMPLE_SECONDS: Final = 5.0


async def sample_regularly(service: Service, recorder: Recorder, *, database: bool) -> None:
    """Sample for as long as the service runs; with `database`, also what all processes have in common."""
    store_method.set(("sampling", "sampling"))  # which is nobody's call of the store
    while True:
        sample_process(service, recorder)
        if database:
            try:
                await sample_store(service.store, recorder)
            except LightningError as error:
                logger.warning("the queue could not be looked at for the metrics: %s", error)
            except Exception:
                logger.exception("the queue could not be looked at for the metrics")
        await asyncio.sleep(SAMPLE_SECONDS)


def sample_process(service: Service, recorder: Recorder) -> None:
    """Sample what this process is busy with."""
    load = service.load
    recorder.set(CALLS_IN_FLIGHT, (), load.calls.taken)
    refused, load.refused = load.refused, 0
    recorder.count(HTTP_CALLS, (OTHER, OTHER, "503"), refused)
    use = service.store.usage()
    recorder.set(POOL_CONNECTIONS, ("in_use",), use.connections_in_use)
    recorder.set(POOL_CONNECTIONS, ("idle",), use.connections_idle)
    for statement, calls in use.calls_waiting.items():
        recorder.set(CALLS_WAITING, (statement,), calls)


async def sample_store(store: LightningStore, recorder: Recorder) -> None:
    """Sample the queue, and how long the database takes to answer.

    Raises:
        DatabaseUnavailableError: it does not answer.
    """
    asked = time.perf_counter()
    await store.ping()
    recorder.set(DATABASE_LATENCY, (), time.perf_counter() - asked)
    state = await store.queue_state()
    recorder.set(QUEUE_DEPTH, (), state.queued)
    recorder.set(QUEUE_OLDEST, (), state.oldest_seconds)
    recorder.set(RUNNING_ATTEMPTS, (), state.running)
    recorder.set(DEADLINES_DUE, (), state.due)
    recorder.set(SAMPLED_TIME, (), time.time())

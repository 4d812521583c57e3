"""PGQueuer, the queue that claims in batches are compared with. Runs in the peers' environment."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import asyncpg
from pgqueuer import db, models, qm, queries, types

from bench.drivers.meter import Meter

ENTRYPOINT = "bench"


async def drain(database_url: str, meter: Meter, *, workers: int, count: int, batch: int) -> None:
    """Enqueue jobs that do nothing and let so many queue managers, each on a connection, empty the queue.

    This is what its own benchmark's drain strategy does, except that the clock stops with the last job, before
    the managers have noticed that it was the last.
    """
    connections = [await asyncpg.connect(database_url) for _ in range(workers)]
    done = 0
    finished = 0.0
    try:
        tables = queries.Queries(db.AsyncpgDriver(connections[0]))
        if not await tables.schema_is_installed():
            await tables.install()
        for first in range(0, count, 1000):
            size = min(1000, count - first)
            await tables.enqueue([ENTRYPOINT] * size, [None] * size, [0] * size)

        # As for ours: the database knows how many there are.
        await connections[0].execute("ANALYZE")

        async def work(job: models.Job) -> None:
            nonlocal done, finished
            done += 1
            finished = time.perf_counter()

        managers = [qm.QueueManager(queries.Queries(db.AsyncpgDriver(connection))) for connection in connections]
        for manager in managers:
            manager.entrypoint(ENTRYPOINT)(work)
        started = time.perf_counter()
        await asyncio.gather(
            *(
                manager.run(dequeue_timeout=timedelta(seconds=0), batch_size=batch, mode=types.QueueExecutionMode.drain)
                for manager in managers
            )
        )
        meter.calls += count
        meter.values["jobs.rate"] = done / (finished - started)
        meter.check(done == count, f"{done} of {count} jobs were done")
    finally:
        for connection in connections:
            await connection.close()

"""A runner in a process of its own, for `test_claims_processes`.

Arguments: database URL, partition, name, and what to do. It says `ready`, waits for a line, works until
there is nothing to do and prints what it did as one line of JSON.
"""

import asyncio
import json
import sys
from typing import Any

from lightning_sql.store.factory import open_store
from lightning_sql.store.interface import LightningStore


async def claim(store: LightningStore, name: str) -> list[list[Any]]:
    """Claim until the queue is empty, one or a few at a time; every first attempt fails."""
    done: list[list[Any]] = []
    while claimed := await store.dequeue_many_rollouts(limit=1 + len(done) % 3, worker_id=name):
        for rollout in claimed:
            number = rollout.attempt.sequence_id
            done.append([rollout.input, number])
            status = "failed" if number == 1 else "succeeded"
            await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status=status)
    return done


async def count(store: LightningStore, name: str) -> list[list[Any]]:
    """Begin attempts of the only rollout, and ask for sequence numbers of its spans."""
    [rollout] = await store.query_rollouts()
    done: list[list[Any]] = []
    for _ in range(15):
        begun = await store.start_attempt(rollout.rollout_id, name)
        done.append(["attempt", begun.attempt.sequence_id])
        done.append(["span", await store.get_next_span_sequence_id(rollout.rollout_id, "any")])
        done.append(["span", await store.get_next_span_sequence_id(rollout.rollout_id, "any")])
    return done


async def main(database_url: str, partition: str, name: str, work: str) -> None:
    async with await open_store(database_url, partition=partition) as store:
        await store.ping()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
        done = await {"claim": claim, "count": count}[work](store, name)
    sys.stdout.write(json.dumps(done) + "\n")


asyncio.run(main(*sys.argv[1:]))

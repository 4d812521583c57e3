"""Claims that go to the database together, of which not all want a rollout."""

import asyncio

import pytest

from lightning_sql.database.dialects.hot import Claim
from lightning_sql.store.sql_store import SqlStore

WORKERS = ["w", "\x1f", "\x1e", "a\x1fb\x1ec", "ü😀", "NULL", '"']
"""Some that are what stands between the texts that travel together."""


async def statuses(store: SqlStore) -> dict[str, str]:
    return {worker.worker_id: worker.status for worker in await store.query_workers()}


@pytest.mark.parametrize("rollouts", [0, 1, 3])
async def test_a_claim_of_nothing_notes_its_worker_beside_others(store: SqlStore, rollouts: int) -> None:
    for number in range(rollouts):
        await store.enqueue_rollout(number)
    answers = await asyncio.gather(store.claim_rows(0, "idle"), store.claim_rows(1, "eager"))
    assert [len(rows) for rows in answers] == [0, min(rollouts, 1)]
    assert await statuses(store) == {"idle": "idle", "eager": "busy" if rollouts else "idle"}


async def test_claims_of_nothing_note_their_workers(store: SqlStore) -> None:
    assert await asyncio.gather(*(store.claim_rows(0, worker) for worker in WORKERS)) == [[]] * len(WORKERS)
    assert await statuses(store) == dict.fromkeys(WORKERS, "idle")


@pytest.mark.parametrize("limit", [1, 2])
async def test_workers_of_any_name_claim_together(store: SqlStore, limit: int) -> None:
    for number in range(limit * len(WORKERS)):
        await store.enqueue_rollout(number)
    answers = await asyncio.gather(*(store.claim_rows(limit, worker) for worker in [*WORKERS, None]))
    assert [len(rows) for rows in answers] == [limit] * len(WORKERS) + [0]
    assert await statuses(store) == dict.fromkeys(WORKERS, "busy")
    attempts = {worker: await store.query_attempts(rows[0][0]) for worker, rows in zip(WORKERS, answers, strict=False)}
    assert {worker: [attempt.worker_id for attempt in found] for worker, found in attempts.items()} == {
        worker: [worker] for worker in WORKERS
    }


@pytest.mark.parametrize("wanted", [0, 1, 2])
async def test_one_statement_takes_claims_of_any_size(store: SqlStore, wanted: int) -> None:
    await store.enqueue_rollout(1)
    claims = [Claim("none", []), Claim("some", [f"at-{number}" for number in range(wanted)]), Claim(None, [])]
    _, given = await store._lanes.hot.claim(claims, None)
    assert [len(rows) for rows in given] == [0, min(wanted, 1), 0]
    assert await statuses(store) == {"none": "idle", "some": "busy" if wanted else "idle"}

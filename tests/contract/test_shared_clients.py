"""One object for several threads: a client, and the store in memory."""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from typing_extensions import override

from lightning_api.client import LightningClient
from lightning_sql.collections.memory import MemoryCollections
from lightning_sql.errors import LightningError
from lightning_sql.store.collection_store import CollectionStore
from lightning_sql.store.factory import open_store
from lightning_sql.store.interface import LightningStore
from lightning_sql.store.threaded import threaded
from lightning_sql.testing.samples import make_span
from tests.backends import ServerThread

THREADS = 8
TASKS = 20
PATIENCE = 60.0


@pytest.fixture(params=["http", "memory"])
async def shared(request: pytest.FixtureRequest, server: ServerThread) -> AsyncIterator[LightningStore]:
    if request.param == "memory":
        async with await open_store("memory://", thread_safe=True) as store:
            yield store
        return
    async with server.serving(CollectionStore(MemoryCollections())) as address:
        async with LightningClient(address) as client:
            yield client


async def in_threads(work: Callable[[int], Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run work in threads, each with an event loop of its own."""
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*(asyncio.to_thread(asyncio.run, work(number)) for number in range(THREADS)))


async def test_threads_share_it(shared: LightningStore) -> None:
    assert shared.capabilities["async_safe"]

    async def work(number: int) -> list[tuple[str, int]]:
        for _ in range(TASKS):
            await shared.enqueue_rollout(number)
        mine: list[tuple[str, int]] = []
        while (claimed := await shared.dequeue_rollout(f"w{number}")) is not None:
            spans = [make_span(claimed.rollout_id, claimed.attempt.attempt_id, f"s{n}") for n in range(3)]
            assert all(await asyncio.gather(*(shared.add_span(span) for span in spans)))
            await shared.update_attempt(claimed.rollout_id, "latest", status="succeeded")
            mine.append((claimed.rollout_id, claimed.attempt.sequence_id))
        return mine

    claimed = Counter(pair for pairs in await in_threads(work) for pair in pairs)
    assert len(claimed) == THREADS * TASKS
    assert set(claimed.values()) == {1}
    assert {sequence_id for _, sequence_id in claimed} == {1}
    assert (await shared.query_rollouts(status_in=["succeeded"])).total == THREADS * TASKS
    statistics = await shared.statistics()
    assert statistics["total_spans"] == 3 * THREADS * TASKS


async def test_a_waiting_claim_is_woken_from_another_thread(shared: LightningStore) -> None:
    waiting = asyncio.create_task(shared.dequeue_rollout("w", wait=PATIENCE))
    await asyncio.sleep(0.1)

    async def enqueue() -> str:
        return (await shared.enqueue_rollout(1)).rollout_id

    rollout_id = await asyncio.to_thread(asyncio.run, enqueue())
    claimed = await waiting
    assert claimed is not None
    assert claimed.rollout_id == rollout_id


async def test_the_store_in_memory_has_a_thread_until_it_is_closed() -> None:
    before = set(threading.enumerate())
    store = await open_store("memory://", thread_safe=True)
    assert store.capabilities["thread_safe"]
    assert set(threading.enumerate()) == before
    await store.enqueue_rollout(1)
    assert len(set(threading.enumerate()) - before) == 1
    with pytest.raises(LightningError):
        await store.query_rollouts(limit=0)
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=["none"]))
    assert await waiting == []
    await store.close()
    assert set(threading.enumerate()) == before


async def test_a_thread_ends_even_if_nobody_waits_for_it() -> None:
    before = set(threading.enumerate())
    store = await open_store("memory://", thread_safe=True)
    for _ in range(3):
        await store.enqueue_rollout(1)
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    assert set(threading.enumerate()) == before


async def test_who_is_served_while_the_thread_ends_is_told() -> None:
    begun = threading.Semaphore(0)

    class Slow(CollectionStore):
        @override
        async def query_workers(self, **_query: Any) -> Any:
            begun.release()
            await asyncio.sleep(PATIENCE)

    store = threaded(lambda: Slow(MemoryCollections()))
    call = asyncio.create_task(store.query_workers())
    blocking = asyncio.create_task(asyncio.to_thread(store.call_blocking, PATIENCE, "query_workers"))
    for _ in range(2):
        await asyncio.to_thread(begun.acquire)
    await store.close()
    for told in await asyncio.gather(call, blocking, return_exceptions=True):
        assert isinstance(told, LightningError), told


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("used", [False, True])
async def test_the_store_in_memory_is_not_in_a_forked_process(used: bool) -> None:
    async with await open_store("memory://", thread_safe=True) as store:
        if used:
            await store.enqueue_rollout(1)
        child = os.fork()
        if not child:
            status = 1
            try:
                asyncio.run(store.close())
                asyncio.run(store.query_rollouts())
            except LightningError:
                status = 7
            finally:
                os._exit(status)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert (await store.query_rollouts()).total == used

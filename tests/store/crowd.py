"""One store used by several threads, each with an event loop of its own, and by a forked process.

`python -m tests.store.crowd URL SECONDS [upstream]` runs it in a process that may be forked, and says what was done.
"""

import asyncio
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

THREADS = 8
PATIENCE = 60.0

OpenStore = Callable[[str], Any]
SpanOf = Callable[[Any, str], Any]


def of_ours(url: str) -> tuple[Any, SpanOf]:
    from lightning_sql.database.engine import Database
    from lightning_sql.store.factory import prepare_database
    from lightning_sql.store.sql_store import SqlStore
    from lightning_sql.testing.samples import make_span

    asyncio.run(prepare_database(url))
    store = SqlStore(Database(url), partition=f"crowd {os.getpid()}")
    return store, lambda claimed, name: make_span(claimed.rollout_id, claimed.attempt.attempt_id, name)


def of_upstream(url: str) -> tuple[Any, SpanOf]:
    # First the tests' way to upstream's package, then what imports it.
    make_span = import_module("tests.upstream.agl").make_span
    store = import_module("lightning_sql.integrations.agentlightning").SqlLightningStore
    return store(url, partition=f"crowd {os.getpid()}"), lambda claimed, name: make_span(claimed, name, 1)


async def cycles(store: Any, span_of: SpanOf, name: str, seconds: float) -> int:
    """Rollouts from their queueing to their end, one after the other; how many."""
    done = 0
    deadline = time.monotonic() + seconds
    while not done or time.monotonic() < deadline:
        async with asyncio.timeout(PATIENCE):
            await store.enqueue_rollout({"by": name})
            claimed = await store.dequeue_rollout(name)
            if claimed is None:  # somebody else was as quick
                continue
            await store.add_span(span_of(claimed, "span"))
            await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
            [found] = await store.wait_for_rollouts(rollout_ids=[claimed.rollout_id], timeout=PATIENCE)
            assert found.status == "succeeded", found
        done += 1
    return done


async def several(store: Any, span_of: SpanOf, name: str, seconds: float) -> int:
    done = await asyncio.gather(*(cycles(store, span_of, f"{name}-{number}", seconds) for number in range(3)))
    return sum(done)


def crowd(store: Any, span_of: SpanOf, seconds: float) -> dict[str, Any]:
    done: dict[str, int] = {}
    errors: list[str] = []

    def work(name: str, *, fails: bool) -> None:
        try:
            done[name] = asyncio.run(several(store, span_of, name, seconds))
        except BaseException as error:  # noqa: BLE001 - it is told
            if fails:
                errors.append(f"{name}: {error!r}")

    threads = [threading.Thread(target=work, args=(f"t{number}",), kwargs={"fails": True}) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 3)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.write(write, str(asyncio.run(several(store, span_of, "child", seconds / 3))).encode())
            status = 0
        except BaseException:  # noqa: BLE001 - it is told, and the process ends here
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    done["child"] = int(os.read(read, 100) or b"-1")
    os.close(read)
    _, status = os.waitpid(child, 0)
    for thread in threads:
        thread.join()
    if status:
        errors.append(f"the child ended with {status}")
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return {"done": done, "errors": errors, "threads": left}


def main(url: str, seconds: str, kind: str = "ours") -> None:
    store, span_of = (of_upstream if kind == "upstream" else of_ours)(url)
    told = crowd(store, span_of, float(seconds))

    async def count() -> int:
        statistics = await store.statistics()
        await store.close()
        return statistics["total_spans"]

    told["spans"] = asyncio.run(count())
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

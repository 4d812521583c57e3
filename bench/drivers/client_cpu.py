"""What a client's calls cost its own process: `python -m bench.drivers.client_cpu KIND URL CALLS AT_ONCE`.

KIND is `ours`, or `upstream` in the environment of that. It prints a line of JSON: microseconds of CPU time for a call.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bench.payloads import SPAN_BYTES, rollout_input, span


def _client(kind: str, url: str) -> tuple[Any, Callable[[Any], Any]]:
    """A client, and what makes its kind of span from plain data."""
    if kind == "ours":
        from lightning_api.client import LightningClient
        from lightning_sql.records import Span

        return LightningClient(url), Span.model_validate
    from bench.upstream_package import prepare_upstream_package

    prepare_upstream_package()
    from agentlightning.store.client_server import LightningStoreClient
    from agentlightning.types import Span as TheirSpan

    return LightningStoreClient(url), TheirSpan.model_validate


async def measure(kind: str, url: str, calls: int, at_once: int) -> dict[str, float]:
    """Microseconds of this process for each kind of call, of which so many are on their way at any time."""
    client, span_of = _client(kind, url)
    spent: dict[str, float] = {}
    claimed: list[Any] = []

    async def run(name: str, call: Callable[[int], Awaitable[Any]]) -> None:
        numbers = iter(range(calls))

        async def some() -> None:
            for number in numbers:
                await call(number)

        started = time.process_time()
        await asyncio.gather(*(some() for _ in range(at_once)))
        spent[name] = (time.process_time() - started) / calls * 1e6

    async def claim(_number: int) -> None:
        claimed.append(await client.dequeue_rollout(worker_id="client-cpu"))

    resources = await client.add_resources({})
    await client.enqueue_rollout(rollout_input())  # connects
    claimed.append(await client.dequeue_rollout(worker_id="client-cpu"))
    claimed.clear()
    await run("enqueue_rollout", lambda _: client.enqueue_rollout(rollout_input()))
    await run("dequeue_rollout", claim)
    keys = [(one.rollout_id, one.attempt.attempt_id) for one in claimed]
    await run("get_next_span_sequence_id", lambda number: client.get_next_span_sequence_id(*keys[number]))
    spans = [span_of(span(*key, 1, SPAN_BYTES)) for key in keys]
    await run("add_span", lambda number: client.add_span(spans[number]))
    await run("query_spans", lambda number: client.query_spans(keys[number][0]))
    await run("get_resources_by_id", lambda _: client.get_resources_by_id(resources.resources_id))
    await run("update_attempt", lambda number: client.update_attempt(*keys[number], status="succeeded"))
    await run("wait_for_rollouts", lambda number: client.wait_for_rollouts(rollout_ids=[keys[number][0]], timeout=0))
    await client.close()
    return spent


if __name__ == "__main__":
    sys.stdout.write(
        json.dumps(asyncio.run(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))) + "\n"
    )

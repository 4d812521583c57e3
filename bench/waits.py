"""`python -m bench.waits`: how long a claim that waits takes to get a rollout that is enqueued."""

# rich_click leaves out a type parameter of click's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import rich_click as click
import uvloop

from bench import families
from bench.families import Bench, Result, Tally
from bench.processes import BenchError
from lightning_api.client import LightningClient
from lightning_sql.errors import LightningError

TASKS: Final = 500
WAITERS: Final = 1000
PAUSE_SECONDS: Final = 0.02
SETTLE_SECONDS: Final = 2.0
"""How long waiters have to come to wait."""
PATIENCE_SECONDS: Final = 60.0


@click.command(context_settings=families.CONTEXT)
@click.option("--store-url", required=True, metavar="URL", help="The server at which claims wait.")
@click.option(
    "--enqueue-url", metavar="URL", help="The server at which rollouts are enqueued, on the same database (the same)."
)
@click.option("--waiters", type=click.IntRange(1, 10_000), default=WAITERS, metavar="N", help=f"({WAITERS})")
@click.option("--total-tasks", type=click.IntRange(1), default=TASKS, metavar="N", help=f"({TASKS})")
@click.option("--backend", default="server", metavar="NAME", help="What to call the server's database (server).")
@families.summary_option
def main(
    store_url: str, enqueue_url: str | None, waiters: int, total_tasks: int, backend: str, summary_file: Path | None
) -> int:
    """Let claims wait, enqueue rollouts one after the other, and say when each was handed over.

    The time is from before a rollout is sent to the server until a waiting claim has been answered with it.
    """
    waiting_at = families.http_address("--store-url", store_url)
    enqueued_at = families.http_address("--enqueue-url", enqueue_url or store_url)
    bench = Bench("waits", summary_file)
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        bench.progress("waits", total_tasks) as advance,
    ):
        tally, seconds = runner.run(measured(waiting_at, enqueued_at, waiters, total_tasks, advance))
    apart = waiting_at != enqueued_at
    return bench.finish(
        [
            Result(
                name="another server" if apart else "the same server",
                parameters={"total_tasks": total_tasks, "waiters": waiters, "apart": apart},
                backend=backend,
                tasks=total_tasks,
                seconds=seconds,
                tally=tally,
            )
        ]
    )


async def measured(
    waiting_at: str, enqueued_at: str, waiters: int, total: int, advance: Callable[[int], None]
) -> tuple[Tally, float]:
    """What came of so many rollouts, and the seconds that all took."""
    sent: dict[int, float] = {}
    tally, handed = Tally(), asyncio.Event()
    async with AsyncExitStack() as stack:
        claiming = await stack.enter_async_context(LightningClient(waiting_at, retry_seconds=0))
        sending = await stack.enter_async_context(LightningClient(enqueued_at, retry_seconds=0))
        if await sending.dequeue_rollout("bench-waits") is not None:
            raise BenchError("the queue is not empty")

        async def wait(number: int) -> None:
            while True:
                try:
                    claimed = await claiming.dequeue_rollout(f"bench-waits-{number}", wait=PATIENCE_SECONDS)
                except LightningError as error:
                    tally.fail(f"{type(error).__name__}: {error}")
                    return
                if claimed is not None:
                    tally.succeed(time.perf_counter() - sent[claimed.input])
                    advance(1)
                    if tally.succeeded == total:
                        handed.set()
                    await claiming.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")

        waiting = [asyncio.create_task(wait(number)) for number in range(waiters)]
        try:
            await asyncio.sleep(SETTLE_SECONDS)
            started = time.perf_counter()
            await _enqueue(sending, total, sent)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(handed.wait(), PATIENCE_SECONDS)
            seconds = time.perf_counter() - started
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    return tally, seconds


async def _enqueue(client: LightningClient, total: int, sent: dict[int, float]) -> None:
    """Enqueue rollouts one after the other, and note when each is sent."""
    for number in range(total):
        sent[number] = time.perf_counter()
        await client.enqueue_rollout(number)
        await asyncio.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    families.launch(main, "bench.waits")

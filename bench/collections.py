"""`python -m bench.collections`: how fast many at once use one collection, queue or counter, without a server."""

# rich_click leaves out a type parameter of click's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import rich_click as click
import uvloop

from bench import families
from bench.contender import TASKS, Done, Share, check, contend, opened, prepare
from bench.crew import run_crew
from bench.databases import data_folder, postgres
from bench.families import Bench, Result, Tally
from bench.machine import cores
from bench.processes import START_SECONDS, BenchError
from lightning_sql.collections.memory import MemoryCollections
from lightning_sql.collections.protocols import LightningCollections
from lightning_sql.store.factory import prepare_database

PROCESSES_PER_CORE: Final = 2
MOST_THREADS: Final = 128

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says."""

    benchmark: str
    backend: str
    total_tasks: int
    concurrency: int
    task_prefix: str
    database_url: str | None
    data_dir: Path | None

    def shares(self, workers: int) -> list[Share]:
        """The tasks and the concurrency, dealt out to so many workers as evenly as can be."""
        tasks, coroutines = _dealt(self.total_tasks, workers), _dealt(self.concurrency, workers)
        firsts = [sum(tasks[:number]) for number in range(workers)]
        return [
            Share(self.benchmark, self.task_prefix, *numbers) for numbers in zip(firsts, tasks, coroutines, strict=True)
        ]


def _dealt(whole: int, parts: int) -> list[int]:
    return [whole // parts + (number < whole % parts) for number in range(parts)]


@click.command(context_settings=families.CONTEXT)
@click.argument("benchmark", type=click.Choice(list(TASKS)))
@click.option("--backend", type=click.Choice(["memory", "sqlite", "postgres"]), default="memory", help="(memory)")
@click.option("--total-tasks", type=click.IntRange(1), default=100_000, metavar="N", help="How many (100000).")
@click.option("--concurrency", type=click.IntRange(1), default=128, metavar="N", help="How many at once (128).")
@click.option("--task-prefix", default="task", metavar="TEXT", help="What the names of tasks begin with (task).")
@click.option("--database-url", metavar="URL", help="A PostgreSQL to create a database on (one of its own).")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where databases go, on a disk (temporary folder).")
@families.summary_option
def main(summary_file: Path | None, **given: Any) -> int:
    """Contend for a collection (insert), a queue (dequeue) or a counter (inc)."""
    options = Options(**given)
    if options.database_url is not None and options.backend != "postgres":
        raise BenchError(f"--database-url is for --backend postgres, not for {options.backend}")
    if not 0 < len(options.task_prefix.encode()) <= 400 or not options.task_prefix.isprintable():
        raise BenchError("--task-prefix must be 1 to 400 bytes of printable text")
    bench = Bench("collections", summary_file)
    return bench.finish([run(options, bench)])


def run(options: Options, bench: Bench) -> Result:
    """Measure one benchmark.

    Raises:
        BenchError: it cannot be done.
    """
    what = f"{options.benchmark} on {options.backend}"
    if options.backend == "memory":
        workers = min(options.concurrency, MOST_THREADS, options.total_tasks)
        collections = MemoryCollections()
        asyncio.run(prepare(collections, options.benchmark, options.task_prefix, options.total_tasks))
        with bench.progress(what, options.total_tasks) as advance:
            done = in_threads(collections, options.shares(workers), advance)
        tally = asyncio.run(checked(options, collections, done))
    else:
        workers = min(options.concurrency, PROCESSES_PER_CORE * max(cores(), 2), options.total_tasks)
        with database(options) as (database_url, folder):
            partition = uuid.uuid4().hex
            asyncio.run(prepared(options, database_url, partition))
            jobs = [
                {"database_url": database_url, "partition": partition, "share": asdict(share)}
                for share in options.shares(workers)
            ]
            with bench.progress(what, options.total_tasks) as advance:
                answers = run_crew("bench.contender", jobs, folder, advance)
            done = [Done(**answer | {"tally": Tally.from_json(answer["tally"])}) for answer in answers]
            tally = asyncio.run(checked_again(options, database_url, partition, done))
    kind = "threads" if options.backend == "memory" else "processes"
    return Result(
        name=options.benchmark,
        parameters={
            "total_tasks": options.total_tasks,
            "concurrency": options.concurrency,
            "task_prefix": options.task_prefix,
            kind: workers,
        },
        backend=options.backend,
        tasks=options.total_tasks,
        seconds=max(one.ended for one in done) - min(one.began for one in done),
        tally=tally,
        extra={"concurrency": options.concurrency, kind: workers},
    )


def in_threads(collections: MemoryCollections, shares: Sequence[Share], advance: Advance) -> list[Done]:
    """Have shares done by a thread each, with an event loop of its own.

    Collections in memory are for one event loop: their locks do not hold between threads. So each call is made
    under a lock of threads, as whoever shares them between threads has to.
    """
    barrier, guard = threading.Barrier(len(shares), timeout=START_SECONDS), threading.Lock()

    abandoned = threading.Event()

    async def ready() -> None:
        barrier.wait()  # nothing else runs on this loop yet

    def told(done: int) -> None:
        if abandoned.is_set():
            raise BenchError("nobody waits for it any more")
        advance(done)

    def thread(share: Share) -> Done:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(contend(collections, share, ready, told, guard))

    with ThreadPoolExecutor(len(shares)) as executor:
        running = [executor.submit(thread, share) for share in shares]
        try:
            futures.wait(running, return_when=futures.FIRST_EXCEPTION)
        finally:
            abandoned.set()  # if one has failed, or somebody interrupts, the others need not go on
        return [future.result() for future in running]


@contextlib.contextmanager
def database(options: Options) -> Iterator[tuple[str, Path]]:
    """An empty database of the backend, and a folder for logs; both are gone after the block."""
    folder = data_folder(options.data_dir)
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning-bench-", dir=folder)))
        if options.backend == "sqlite":
            yield f"sqlite:///{place / 'collections.db'}", place
        else:
            server = stack.enter_context(postgres(options.database_url, folder))
            yield stack.enter_context(server.database()), place


async def prepared(options: Options, database_url: str, partition: str) -> None:
    """Make the tables, and put in what the workers need to find."""
    await prepare_database(database_url)
    async with opened(database_url, partition) as collections:
        await prepare(collections, options.benchmark, options.task_prefix, options.total_tasks)


async def checked_again(options: Options, database_url: str, partition: str, done: Sequence[Done]) -> Tally:
    """The same as `checked`, on a database."""
    async with opened(database_url, partition) as collections:
        return await checked(options, collections, done)


async def checked(options: Options, collections: LightningCollections, done: Sequence[Done]) -> Tally:
    """What came of all shares, compared with what is there now."""
    tally = Tally.sum(one.tally for one in done)
    numbers = [number for one in done for number in one.numbers]
    await check(collections, options.benchmark, options.task_prefix, options.total_tasks, tally, numbers)
    return tally


if __name__ == "__main__":
    families.launch(main, "bench.collections")

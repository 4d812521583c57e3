"""One SQLite file under many processes: `python -m tests.faults.sqlite_processes --seconds 60`.

Four processes write and four read, and one after the other is killed inside of a transaction. The last line of the
output is the verdict, and the exit code is 1 when anything is wrong.
"""

import argparse
import asyncio
import json
import sqlite3
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.processes import python_path
from lightning_sql.database.engine import Database
from lightning_sql.store.factory import prepare_database
from lightning_sql.store.sql_store import SqlStore
from tests.faults.ledger import Ledger, Report, check, read
from tests.faults.sqlite_process import KEYS
from tests.faults.stage import ROOT, until

__all__ = ["Outcome", "play"]

WRITERS = 4
READERS = 4
CALM_SECONDS = 2.0
"""Between two processes that are killed."""
PATIENCE = 60.0


@dataclass
class Outcome:
    """What happened, and what is wrong."""

    report: Report
    ledger: Ledger
    kills: int = 0
    writes: int = 0
    """Rollouts that were worked on."""
    reads: int = 0
    """Looks at the whole store."""
    unseen: list[list[Any]] = field(default_factory=lambda: [[], [], []])
    """The keys of the rollouts, attempts and spans that were in transactions of processes that were killed."""
    wrong: list[str] = field(default_factory=list[str])
    pauses: list[float] = field(default_factory=list[float])
    """Seconds from each kill until somebody else's write was acknowledged."""
    largest_log: int = 0
    """Bytes of the write-ahead log."""


class _Family:
    """The processes on one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "shared.db"
        self.url = f"sqlite:///{self.file}"
        self._processes: list[tuple[str, Process]] = []

    async def start(self, role: str, number: int) -> Process:
        name = f"{role}{number}"
        with (self.folder / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.faults.sqlite_process", role, self.url),
                *(str(self.folder / f"{name}.jsonl"), name),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env=python_path(),
                cwd=ROOT,
                limit=2**24,
            )
        self._processes.append((name, process))
        return process

    def ledger(self) -> Ledger:
        return read(self.folder.glob("*.jsonl"))

    def written(self) -> int:
        """Bytes that those who live wrote down."""
        return sum(book.stat().st_size for book in self.folder.glob("write*.jsonl"))

    async def stop(self, outcome: Outcome) -> None:
        """Let all end that were not killed."""
        for _, process in self._processes:
            if process.returncode is None and process.stdin is not None:
                process.stdin.close()
        for name, process in self._processes:
            async with asyncio.timeout(PATIENCE):
                output, _ = await process.communicate()
            if process.returncode:
                if not name.startswith("crash"):
                    outcome.wrong.append(f"{name}: {(self.folder / f'{name}.log').read_text()[-2000:]}")
            elif name.startswith("write"):
                outcome.writes += int(output)
            elif name.startswith("read"):
                outcome.reads += int(output)

    async def close(self) -> None:
        for _, process in self._processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


@asynccontextmanager
async def _family(folder: Path) -> AsyncGenerator[_Family]:
    family = _Family(folder)
    await prepare_database(family.url)
    try:
        yield family
    finally:
        await family.close()


async def play(folder: Path, seconds: float) -> Outcome:
    """Let processes work on a new file in a folder for so long, and kill one inside of a transaction now and then."""
    async with _family(folder) as family:
        for number in range(WRITERS):
            await family.start("write", number)
        for number in range(READERS):
            await family.start("read", number)
        await until(lambda: family.written() > 0)
        outcome = Outcome(Report(), Ledger())
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            await _kill_one(family, outcome)
            outcome.largest_log = max(outcome.largest_log, (folder / "shared.db-wal").stat().st_size)
            await asyncio.sleep(max(0.0, min(CALM_SECONDS, deadline - time.monotonic())))
        await family.stop(outcome)
        outcome.ledger = family.ledger()
        async with SqlStore(Database(family.url)) as store:
            outcome.report = await check(outcome.ledger, store)
        outcome.wrong += outcome.report.wrong
        outcome.wrong += _seen(family.file, outcome.unseen)
        return outcome


async def _kill_one(family: _Family, outcome: Outcome) -> None:
    """Start a process that stops inside of a transaction, and kill it there."""
    process = await family.start("crash", outcome.kills)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        line = await process.stdout.readline()
    for index, keys in enumerate(json.loads(line)):
        outcome.unseen[index] += keys
    if not _is_locked(family.file):
        outcome.wrong.append("a process that is in a transaction does not keep others out")
    before = family.written()
    killed = time.monotonic()
    process.kill()
    await process.wait()
    await until(lambda: family.written() > before, pause=0.001)
    outcome.pauses.append(time.monotonic() - killed)
    outcome.kills += 1
    outcome.wrong += await asyncio.to_thread(_damage, family.file)


def _is_locked(file: Path) -> bool:
    with closing(sqlite3.connect(file, timeout=0, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            return error.sqlite_errorcode == sqlite3.SQLITE_BUSY
        return False


def _damage(file: Path) -> list[str]:
    with closing(sqlite3.connect(file, timeout=PATIENCE)) as connection:
        return [row[0] for row in connection.execute("PRAGMA integrity_check") if row[0] != "ok"]


def _seen(file: Path, unseen: list[list[Any]]) -> list[str]:
    """What is in the file of transactions that were never committed."""
    wrong: list[str] = []
    with closing(sqlite3.connect(file)) as connection:
        for (table, columns), keys in zip(KEYS.items(), unseen, strict=True):
            stored = set(connection.execute(f"SELECT {columns} FROM {table}"))
            wrong += [f"{table}: {key} was never committed" for key in map(tuple, keys) if key in stored]
    return wrong


def main() -> int:
    """Play, and say how it went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lightning-sql-processes-") as folder:
        outcome = asyncio.run(play(Path(folder), options.seconds))
        size = (Path(folder) / "shared.db").stat().st_size
    for what in outcome.wrong:
        sys.stdout.write(f"{what}\n")
    counts = outcome.report.counts
    sys.stdout.write(
        f"acknowledged: {dict(counts)}; file {size / 1e6:.0f} MB, log at most {outcome.largest_log / 1e6:.0f} MB;"
        f" never committed: {[len(keys) for keys in outcome.unseen]}\n"
        f"sqlite_processes: writers={WRITERS} readers={READERS} rollouts={outcome.writes} reads={outcome.reads}"
        f" kills={outcome.kills} longest_pause_ms={1000 * max(outcome.pauses):.0f}"
        f" lost={len(outcome.report.lost)} double={len(outcome.report.double)} wrong={len(outcome.wrong)}\n"
    )
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

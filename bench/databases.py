"""The databases that are measured: one PostgreSQL server with durable settings, and a folder of SQLite files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import asyncpg
import psutil

from bench.catalogue import connect_postgres
from bench.cpu import parent_of
from bench.processes import ROOT, BenchError, started
from bench.seed import EXIT_NOT_AVAILABLE
from lightning_sql.testing.postgres import PostgresServer, PostgresUnavailableError, postgres_cluster

_DURABLE: Final = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
_NO_DISK: Final = frozenset({"tmpfs", "ramfs"})


class Postgres:
    """A PostgreSQL server to create databases on.

    Attributes:
        version: what it says it is, `15.4` for example.
        shared_buffers: as it shows it.
        pid: its main process, None when it runs on another machine.
    """

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        shown = asyncio.run(_show(server.url, "server_version", "shared_buffers", *_DURABLE))
        self.version = shown["server_version"].split()[0]
        self.shared_buffers = shown["shared_buffers"]
        off = [name for name, value in _DURABLE.items() if shown[name] != value]
        if off:
            raise BenchError(f"{', '.join(off)} is off on this PostgreSQL: what it would measure is not durable")
        self.pid = asyncio.run(_main_pid(server.url))

    @property
    def url(self) -> str:
        """Where it can be told to create databases."""
        return self._server.url

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """A fresh database, dropped with the block."""
        with _reached():
            url = self._server.create_database(f"bench_{uuid.uuid4().hex}")
        try:
            yield url
        finally:
            self._server.drop_database(url)


@contextlib.contextmanager
def postgres(url: str | None, folder: Path) -> Iterator[Postgres]:
    """The server at a URL, or a throwaway one of our own with its files below a folder.

    Raises:
        BenchError: there is none, it does not start, or what it acknowledges is not on disk.
    """
    if url is not None:
        with _reached():
            server = Postgres(PostgresServer(url))
        yield server
        return
    buffers = "1GB" if psutil.virtual_memory().total > 6 * 2**30 else "128MB"
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        with postgres_cluster(settings=_DURABLE | {"shared_buffers": buffers}) as cluster:
            yield Postgres(cluster)
    except PostgresUnavailableError as error:
        raise BenchError(str(error)) from error
    finally:
        tempfile.tempdir = before


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    """Say in a line, and without the URL, which may hold a password, why a server cannot be used."""
    try:
        yield
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, ValueError) as error:
        raise BenchError(f"this PostgreSQL cannot be used: {error or type(error).__name__}") from error


async def _show(url: str, *names: str) -> dict[str, str]:
    connection = await connect_postgres(url)
    try:
        return {name: await connection.fetchval(f"SHOW {name}") for name in names}
    finally:
        await connection.close()


async def _main_pid(url: str) -> int | None:
    """The server's main process, None when it is not of this machine."""
    connection: Any = await connect_postgres(url)
    try:
        pid = connection.get_server_pid()
        with contextlib.suppress(psutil.Error):
            if "postgres" in psutil.Process(pid).name():
                return parent_of(pid)  # while we are connected: the process that serves us ends with that
        return None
    finally:
        await connection.close()


def data_folder(wanted: Path | None) -> Path:
    """An existing folder for database files on a real disk: the one that is wanted, or a usual one.

    Raises:
        BenchError: it lies in memory, where nothing is durable.
    """
    for folder in [wanted] if wanted else [Path(tempfile.gettempdir()), Path("/var/tmp"), ROOT]:
        if folder.is_dir() and filesystem(folder) not in _NO_DISK:
            return folder.resolve()
    raise BenchError(f"{wanted or tempfile.gettempdir()} is in memory or no folder: name one on a disk with --data-dir")


def filesystem(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    mounts = [part for part in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"


def fill(database_url: str, rollouts: int) -> str | None:
    """Put finished rollouts into a database; the reason when this release cannot.

    Raises:
        BenchError: it failed.
    """
    command = [sys.executable, "-m", "bench.seed", database_url, "--rollouts", str(rollouts)]
    with started(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, said = process.communicate()
    if process.returncode == EXIT_NOT_AVAILABLE:
        return said.decode(errors="replace").strip()
    if process.returncode != 0:
        raise BenchError(f"the database cannot be filled: {said.decode(errors='replace')[-1000:]}")
    return None


def fsyncs_per_second(folder: Path, seconds: float = 0.5) -> float:
    """How often the disk below a folder takes another page and says that it has it."""
    times = 0
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            file.write(b"\0" * 8192)
            file.flush()
            os.fdatasync(file.fileno())
            times += 1
        return times / (time.perf_counter() - started)

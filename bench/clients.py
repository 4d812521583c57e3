"""`python -m bench.clients`: what calls cost the process that makes them, by our client and by upstream's."""

# rich_click leaves out a type parameter of click's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import rich_click as click
from rich.console import Console
from rich.table import Table

from bench import families
from bench.databases import data_folder
from bench.peer import peer_python
from bench.processes import ROOT, BenchError, python_path
from bench.report import number
from bench.servers import Endpoint, Places, Target

CALLS: Final = 500
ROUNDS: Final = 3
AT_ONCE: Final = (1, 32)
"""How many calls are on their way at any time."""
AIM: Final = 0.25
"""Which part of upstream's a call of ours is to cost at most."""
PATIENCE_SECONDS: Final = 300.0


def cpu_of(python: str, kind: str, url: str, calls: int, at_once: int) -> dict[str, float]:
    """Microseconds of CPU time for each kind of call, of a client in a process of its own.

    Raises:
        BenchError: the process failed.
    """
    command = [python, "-m", "bench.drivers.client_cpu", kind, url, str(calls), str(at_once)]
    done = subprocess.run(
        command, cwd=ROOT, env=python_path(), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    if done.returncode != 0:
        raise BenchError(f"the {kind} client failed: {(done.stderr.strip().splitlines() or ['silently'])[-1]}")
    return json.loads(done.stdout)


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The middle of each call's figures."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def show(console: Console, at_once: int, ours: Mapping[str, float], theirs: Mapping[str, float]) -> None:
    """Print both, and which part of the other's ours costs."""
    title = f"CPU microseconds of a call, in the process of the client, {at_once} at once"
    table = Table(title=title, title_justify="left")
    table.add_column("call", no_wrap=True)
    for heading in ("lightning-sql", "upstream", "part of upstream's"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, cost in ours.items():
        part = cost / theirs[name]
        table.add_row(name, number(cost), number(theirs[name]), f"{part:.2f}", style=None if part <= AIM else "red")
    whole = sum(ours.values()) / sum(theirs.values())
    table.add_row("all of them", number(sum(ours.values())), number(sum(theirs.values())), f"{whole:.2f}")
    console.print(table)


@click.command(context_settings=families.CONTEXT)
@click.option("--calls", type=click.IntRange(1), default=CALLS, metavar="N", help=f"Of each kind ({CALLS}).")
@click.option(
    "--rounds", type=click.IntRange(1), default=ROUNDS, metavar="N", help=f"Of which the middle is taken ({ROUNDS})."
)
@click.option("--peer-venv", type=click.Path(path_type=Path), help="The environment of the upstream client.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where the database goes (temporary folder).")
def main(calls: int, rounds: int, peer_venv: Path | None, data_dir: Path | None) -> int:
    """Make the same calls by both clients against the same server, in turn, and say what they cost."""
    console = Console(width=None if sys.stdout.isatty() else families.WIDTH)
    theirs = peer_python(peer_venv or ROOT / ".bench-peer")
    found: dict[tuple[int, str], list[dict[str, float]]] = defaultdict(list)
    with ExitStack() as stack:
        work = tempfile.TemporaryDirectory(prefix="lightning-bench-", dir=data_folder(data_dir))
        places = Places(Path(stack.enter_context(work)), None, theirs)
        endpoint = stack.enter_context(places.open(Target("sqlite")))
        if not isinstance(endpoint, Endpoint) or endpoint.base_url is None:
            raise BenchError("there is no server")
        for _ in range(rounds):
            for at_once in AT_ONCE:
                for kind, python in (("ours", sys.executable), ("upstream", theirs)):
                    found[at_once, kind].append(cpu_of(python, kind, endpoint.base_url, calls, at_once))
    for at_once in AT_ONCE:
        show(console, at_once, medians(found[at_once, "ours"]), medians(found[at_once, "upstream"]))
    return 0


if __name__ == "__main__":
    families.launch(main, "bench.clients")

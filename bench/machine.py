"""The machine that was measured on, in words."""

from __future__ import annotations

import os
import platform
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from bench.databases import Postgres, filesystem, fsyncs_per_second


@dataclass(frozen=True, slots=True)
class Machine:
    """What figures depend on beside the programs."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str
    sqlite: str
    postgres: str | None
    shared_buffers: str | None
    folder: str
    fsyncs_per_second: tuple[float, ...]

    def lines(self) -> list[str]:
        """A line for each of them."""
        lines = [
            f"{self.cores} cores ({self.cpu}), {self.memory_gib:.0f} GiB, {self.system}",
            f"Python {self.python}, SQLite {self.sqlite}",
        ]
        if self.postgres:
            lines.append(
                f"PostgreSQL {self.postgres} on the same machine: `fsync` and `synchronous_commit` on, "
                f"{self.shared_buffers} of shared buffers, otherwise its defaults"
            )
        rates = " to ".join(f"{rate:.0f}" for rate in sorted(self.fsyncs_per_second))
        lines.append(f"databases on {self.folder}, which takes {rates} synced pages a second")
        return lines


def describe(folder: Path, postgres: Postgres | None) -> Machine:
    """Look at this machine; measures its disk for half a second."""
    return Machine(
        cpu=_cpu_model(),
        cores=cores(),
        memory_gib=psutil.virtual_memory().total / 2**30,
        system=f"{platform.system()} {platform.release().partition('-')[0]}",
        python=platform.python_version(),
        sqlite=sqlite3.sqlite_version,
        postgres=postgres.version if postgres else None,
        shared_buffers=postgres.shared_buffers if postgres else None,
        folder=filesystem(folder),
        fsyncs_per_second=(fsyncs_per_second(folder),),
    )


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def facts() -> dict[str, Any]:
    """What of this machine is known without measuring anything, to be written beside figures."""
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }


def after(machine: Machine, folder: Path) -> Machine:
    """The same machine once all was measured: its disk may not be as fast as it was before."""
    return replace(machine, fsyncs_per_second=(*machine.fsyncs_per_second, fsyncs_per_second(folder)))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()

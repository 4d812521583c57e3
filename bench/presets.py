"""Workloads of an algorithm and its runners: what each is made of, those that have a name, and what they can reach."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, get_args

from bench.processes import BenchError

Mode = Literal["batch", "batch_partial", "single"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
Exporter = Literal["simple", "batch"]
EXPORTERS: Final[tuple[Exporter, ...]] = get_args(Exporter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How much an algorithm asks for at once, and what its runners do.

    Attributes:
        mode: `batch` enqueues a batch when the one before is finished, `batch_partial` when no more than
            `remaining_tasks` are unfinished, `single` keeps `concurrency` tasks of one request each going.
        total_tasks: rollouts, all together.
        n_runners: each works on one rollout at a time.
        max_rounds: a rollout has from one to so many rounds, drawn for each task.
        sleep_seconds: what a round sleeps on average; see `bench.traces`.
        exporter: how spans are sent: `simple` sends each by itself when it ends, as upstream's `OtelTracer` does;
            `batch` sends those of the last second together, and what is left at the end of a rollout, as its
            `AgentOpsTracer` does.
    """

    mode: Mode
    total_tasks: int
    n_runners: int
    max_rounds: int
    sleep_seconds: float
    batch_size: int | None = None
    remaining_tasks: int | None = None
    concurrency: int | None = None
    exporter: Exporter = "batch"

    def __post_init__(self) -> None:
        """Find out whether the parts go together.

        Raises:
            BenchError: one is missing for this mode.
        """
        needed = {
            "batch": ("batch_size",),
            "batch_partial": ("batch_size", "remaining_tasks"),
            "single": ("concurrency",),
        }
        missing = [name for name in needed[self.mode] if getattr(self, name) is None]
        if missing:
            options = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise BenchError(f"--mode {self.mode} needs {options}")

    @property
    def ceiling(self) -> float:
        """Rollouts a second that the sleeps allow: runners ÷ (rounds × sleep), as if each had all its rounds."""
        return self.n_runners / (self.max_rounds * self.sleep_seconds) if self.sleep_seconds else float("inf")

    def scaled(self, scale: float) -> Workload:
        """The same with fewer tasks, or more; nothing else changes."""
        return replace(self, total_tasks=max(round(self.total_tasks * scale), 1))

    def parameters(self) -> dict[str, Any]:
        """What is written of it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


PRESETS: Final[dict[str, Workload]] = {
    "minimal": Workload(mode="batch", total_tasks=4096, batch_size=256, n_runners=32, max_rounds=6, sleep_seconds=0.5),
    "medium": Workload(
        mode="batch", total_tasks=10_000, batch_size=1000, n_runners=100, max_rounds=10, sleep_seconds=0.1
    ),
    "midhigh": Workload(
        mode="batch", total_tasks=20_000, batch_size=2048, n_runners=300, max_rounds=6, sleep_seconds=0.1
    ),
    "large-batch": Workload(
        mode="batch", total_tasks=50_000, batch_size=8192, n_runners=1000, max_rounds=3, sleep_seconds=0.1
    ),
    "long-queues": Workload(
        mode="batch_partial",
        total_tasks=50_000,
        batch_size=1024,
        remaining_tasks=4096,
        n_runners=256,
        max_rounds=4,
        sleep_seconds=0.1,
    ),
    "high-concurrency": Workload(
        mode="single", total_tasks=50_000, concurrency=2048, n_runners=256, max_rounds=2, sleep_seconds=0.1
    ),
    "heavy-traces": Workload(
        mode="batch_partial",
        total_tasks=10_000,
        batch_size=1024,
        remaining_tasks=256,
        n_runners=512,
        max_rounds=20,
        sleep_seconds=1.0,
    ),
}
"""The workloads with a name."""

PUBLISHED: Final[dict[str, tuple[float, float]]] = {
    "minimal": (9.06, 8.71),
    "medium": (23.26, 32.79),
    "midhigh": (24.42, 40.24),
    "large-batch": (14.60, 50.05),
    "long-queues": (30.86, 57.01),
    "heavy-traces": (13.28, 29.41),
}
"""Rollouts a second that the upstream project has published of its server, on machines of 32 to 64 cores: in memory,
and on MongoDB."""

SLEEP_SHARE: Final = 0.9
"""Of its ceiling, what a workload that its sleeps hold is to reach."""
SLEEP_BOUND: Final = frozenset({"minimal", "medium"})
"""The presets that are held by their sleeps; the others by the server."""
TIMES_UPSTREAM: Final = 4.0
"""How many times the upstream server's rate the others are to reach."""


def preset(name: str) -> Workload:
    """The workload of a name.

    Raises:
        BenchError: there is none.
    """
    if name not in PRESETS:
        raise BenchError(f"{name!r} is none of the presets {', '.join(PRESETS)}")
    return PRESETS[name]

"""What is measured: pieces of work for a driver on a target, and the metrics that come out of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from bench.servers import Target

Better = Literal["more", "less"]
UPSTREAM_MEMORY: Final = "upstream, memory"


@dataclass(frozen=True, slots=True)
class Work:
    """A job for a driver.

    Attributes:
        name: unique.
        fleet: works of one fleet are measured on the same servers, in turn.
        driver: which process does it: `lean`, `upstream`, `store` or `queue`.
        job: what it does.
        params: the job's own.
        repeats: how often it is done on every target in a round, in turn: small differences between targets
            want to be measured close to each other in time.
    """

    name: str
    fleet: str
    driver: str
    job: str
    params: dict[str, Any] = field(hash=False)
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Source:
    """A value that a work measures on a target."""

    work: str
    target: Target
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A figure of ours beside another's of the same run.

    Attributes:
        name: stable; the last part is the target.
        unit: of both figures.
        better: whether more or less of it is.
        ours: where our figure comes from.
        peer: where the other one does; None when it is not measured.
        against: what the other one is.
        less: subtracted from ours before the ratio is taken.
        floor: the ratio that must be reached (or not exceeded, when less is better).
        target: the ratio that is aimed at.
        extra: further values to report beside it.
    """

    name: str
    unit: str
    better: Better
    ours: Source
    peer: Source | None = None
    against: str = UPSTREAM_MEMORY
    less: Source | None = None
    floor: float | None = None
    target: float | None = None
    extra: dict[str, Source] = field(default_factory=dict, hash=False)

    @property
    def sources(self) -> list[Source]:
        """All values that it needs."""
        return [source for source in (self.ours, self.peer, self.less, *self.extra.values()) if source is not None]


@dataclass(frozen=True, slots=True)
class Plan:
    """The works and the metrics of a run."""

    works: Sequence[Work]
    metrics: Sequence[Metric]

    def only(self, patterns: Sequence[str]) -> Plan:
        """The metrics whose names match one of the patterns, with the works that they need."""
        metrics = [
            metric for metric in self.metrics if not patterns or any(fnmatchcase(metric.name, p) for p in patterns)
        ]
        needed = {source.work for metric in metrics for source in metric.sources}
        return Plan([work for work in self.works if work.name in needed], metrics)

    def targets_of(self, work: Work) -> list[Target]:
        """The targets that a work is done on, each once, in a stable order."""
        found: dict[Target, None] = {}
        for metric in self.metrics:
            found |= {source.target: None for source in metric.sources if source.work == work.name}
        return list(found)

    @property
    def fleets(self) -> list[str]:
        """The names of the fleets, in order."""
        return list(dict.fromkeys(work.fleet for work in self.works))

    def works_of(self, fleet: str) -> list[Work]:
        """The works of a fleet, in order."""
        return [work for work in self.works if work.fleet == fleet]


def rotated(targets: Sequence[Target], number: int) -> list[Target]:
    """The targets in the order of a round: another one begins each time."""
    start = number % len(targets) if targets else 0
    return [*targets[start:], *targets[:start]]


def joined(plans: Iterable[Plan]) -> Plan:
    """Several plans as one."""
    works: list[Work] = []
    metrics: list[Metric] = []
    for plan in plans:
        works += plan.works
        metrics += plan.metrics
    return Plan(works, metrics)

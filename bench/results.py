"""From samples to figures: medians over the rounds, and their ratios."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from bench.plan import Better, Metric, Source, Work
from bench.processes import Outcome
from bench.servers import Target

Verdict = Literal["target", "floor", "below"]


@dataclass(slots=True)
class Samples:
    """What the drivers measured, a mapping of values a round, and what went wrong.

    Attributes:
        failed: how many calls or checks failed.
        failures: the first of them, in words.
    """

    failed: int = 0
    calls: int = 0
    failures: list[str] = field(default_factory=list)
    _rounds: defaultdict[tuple[str, Target], list[Mapping[str, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _unavailable: dict[tuple[str, Target], str] = field(default_factory=dict)

    def add(self, work: Work, target: Target, outcome: Outcome) -> None:
        """Note what a work measured on a target."""
        self.calls += outcome.calls
        self.failed += outcome.failed
        if outcome.failed:
            self.failures.append(f"{work.name} on {target}: {outcome.failed} failed: {'; '.join(outcome.failures)}")
        if outcome.unavailable is not None:
            self.unavailable(work, target, outcome.unavailable)
        elif outcome.values:
            self._rounds[work.name, target].append(outcome.values)

    def unavailable(self, work: Work, target: Target, reason: str) -> None:
        """Note that a work cannot be done on a target."""
        self._unavailable[work.name, target] = reason

    def values(self, source: Source) -> list[float]:
        """A value in each round in which it was measured."""
        rounds = self._rounds.get((source.work, source.target), ())
        return [values[source.value] for values in rounds if source.value in values]

    def reason(self, source: Source) -> str | None:
        """Why there is no value."""
        return self._unavailable.get((source.work, source.target))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A metric that was measured; figures are medians over the rounds.

    Attributes:
        ratio: ours (less what every store must pay) to the peer's, None when one of them is missing.
        note: why a figure is missing.
    """

    name: str
    unit: str
    better: Better
    against: str
    ours: float | None
    peer: float | None
    less: float | None
    ratio: float | None
    floor: float | None
    target: float | None
    rounds: dict[str, list[float]]
    extra: dict[str, float]
    note: str | None

    @property
    def verdict(self) -> Verdict | None:
        """What of its goal it reaches, None when it has none or was not measured."""
        if self.ratio is None or self.floor is None or self.target is None:
            return None
        sign = 1 if self.better == "more" else -1
        if sign * self.ratio >= sign * self.target:
            return "target"
        return "floor" if sign * self.ratio >= sign * self.floor else "below"

    def as_json(self) -> dict[str, Any]:
        """What is written of it."""
        goal = {} if self.floor is None else {"floor": self.floor, "target": self.target, "reached": self.verdict}
        parts: dict[str, Any] = {"ours": self.ours, "peer": self.peer, "ratio": self.ratio, "unit": self.unit}
        parts |= {"better": self.better, "against": self.against}
        parts |= {} if self.less is None else {"less": self.less}
        return parts | goal | self.extra | {"rounds": self.rounds} | ({"note": self.note} if self.note else {})


def figure_of(metric: Metric, samples: Samples) -> Figure:
    """The figure of a metric."""
    rounds = {
        name: samples.values(source)
        for name, source in (("ours", metric.ours), ("peer", metric.peer), ("less", metric.less))
        if source is not None
    }
    ours, peer, less = (median(rounds[name]) if rounds.get(name) else None for name in ("ours", "peer", "less"))
    ratio = None
    if ours is not None and peer and (metric.less is None or less is not None):
        ratio = (ours - (less or 0.0)) / peer
    extra = {name: samples.values(source) for name, source in metric.extra.items()}
    return Figure(
        name=metric.name,
        unit=metric.unit,
        better=metric.better,
        against=metric.against,
        ours=ours,
        peer=peer,
        less=less,
        ratio=ratio,
        floor=metric.floor,
        target=metric.target,
        rounds=rounds,
        extra={name: median(values) for name, values in extra.items() if values},
        note=_note(metric, samples, ours),
    )


def _note(metric: Metric, samples: Samples, ours: float | None) -> str | None:
    reasons = [samples.reason(source) for source in metric.sources]
    found = next((reason for reason in reasons if reason is not None), None)
    if found is not None:
        return f"not available: {found}"
    return "not measured" if ours is None else None


def figures_of(metrics: Sequence[Metric], samples: Samples) -> list[Figure]:
    """The figures of all metrics, in their order."""
    return [figure_of(metric, samples) for metric in metrics]

"""The comparison: every work and every metric, with the floors and targets that were set for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.plan import Better, Metric, Plan, Source, Work, joined
from bench.scale import Scale
from bench.seeds import succeeded_among
from bench.servers import OURS, UPSTREAM, Kind, Target, size_name

RUNNERS: Final = 32
DURABLE: Final = ("postgres", "sqlite")
"""What the floors are for, unless said."""
OPERATIONS: Final = ("enqueue", "dequeue", "next", "span", "update")
GROWING: Final = ("dequeue", "enqueue", "span", "update", "wait")


@dataclass(frozen=True, slots=True)
class Choice:
    """What of it is measured.

    Attributes:
        kinds: which of our stores.
        drivers: `lean`, `upstream`.
        peer: whether the upstream server, and PGQueuer, are measured too.
        scale: how much.
    """

    kinds: Sequence[Kind]
    drivers: Sequence[str]
    peer: bool
    scale: Scale

    def peer_source(self, work: str, value: str, rollouts: int = 0) -> Source | None:
        """The same value of the upstream server."""
        return Source(work, Target(UPSTREAM, rollouts), value) if self.peer else None

    def durable(self) -> list[Kind]:
        """The chosen stores that are durable to the last commit."""
        return [kind for kind in self.kinds if kind in DURABLE]

    def more_drivers(self) -> list[str]:
        """The drivers of what is measured with the lean one alone when time is short."""
        if self.scale.every_driver or len(self.drivers) == 1:
            return list(self.drivers)
        return [driver for driver in self.drivers if driver == "lean"]


def _cycles(choice: Choice) -> Plan:
    works: list[Work] = []
    metrics: list[Metric] = []
    for driver in choice.drivers:
        work = Work(
            f"cycle.{driver}",
            "small",
            driver,
            "cycle",
            {"runners": RUNNERS, "seconds": choice.scale.cycle_seconds},
        )
        works.append(work)
        for kind in choice.kinds:
            floor, target = {"memory": (None, None), "sqlite-normal": (6.0, 10.0)}.get(kind, (5.0, 8.0))
            if driver == UPSTREAM and floor:
                floor, target = 4.0, 5.0
            own = Target(kind)
            extra = {name: Source(work.name, own, f"cycle.{name}") for name in ("p50", "p99", "driver_cpu")}
            metrics.append(
                Metric(
                    name=f"{work.name}.{kind}",
                    unit="cycles/s",
                    better="more",
                    ours=Source(work.name, own, "cycle.rate"),
                    peer=choice.peer_source(work.name, "cycle.rate"),
                    floor=floor if driver == "lean" or kind in DURABLE else None,
                    target=target if driver == "lean" or kind in DURABLE else None,
                    extra=extra,
                )
            )
            parts = ("server_cpu", "database_cpu") if kind == "postgres" else ("server_cpu",)
            metrics.append(
                Metric(
                    name=f"cycle_cpu.{driver}.{kind}",
                    unit="ms CPU a cycle",
                    better="less",
                    ours=Source(work.name, own, "cycle.cpu"),
                    peer=choice.peer_source(work.name, "cycle.cpu"),
                    floor=1 / 5 if kind in DURABLE else None,
                    target=1 / 8 if kind in DURABLE else None,
                    extra={part: Source(work.name, own, f"cycle.{part}") for part in parts},
                )
            )
    return Plan(works, metrics)


def _alone(choice: Choice) -> Plan:
    """One client: latencies, also less those of a bare commit, and a look-up of a hundred rollouts."""
    works = [
        Work(f"commit.{kind}", "small", "store", "commits", {"requests": choice.scale.commits})
        for kind in choice.durable()
    ]
    metrics: list[Metric] = []
    for driver in choice.drivers:
        params = {"clients": 1, "count": choice.scale.alone, "waits": choice.scale.waits}
        work = Work(f"alone.{driver}", "small", driver, "singles", params)
        works.append(work)
        for kind in choice.kinds:
            for operation in (*OPERATIONS, "wait"):
                value = f"{operation}.p50"
                metrics.append(
                    Metric(
                        name=f"latency.{operation}.{driver}.{kind}",
                        unit="ms, median",
                        better="less",
                        ours=Source(work.name, Target(kind), value),
                        peer=choice.peer_source(work.name, value),
                    )
                )
                if kind in DURABLE and operation in ("enqueue", "dequeue"):
                    commit = Source(f"commit.{kind}", Target(kind, served=False), "commit.p50")
                    metrics.append(
                        Metric(
                            name=f"overhead.{operation}.{driver}.{kind}",
                            unit="ms, median, less a bare commit",
                            better="less",
                            ours=Source(work.name, Target(kind), value),
                            peer=choice.peer_source(work.name, value),
                            less=commit,
                            floor=0.6,
                            target=0.4,
                        )
                    )
    return Plan(works, metrics)


def _together(choice: Choice) -> Plan:
    """Several clients: each operation a second."""
    works: list[Work] = []
    metrics: list[Metric] = []
    for driver in choice.drivers:
        wanted = OPERATIONS if driver in choice.more_drivers() else ("dequeue",)
        few = Work(
            f"claims.{driver}",
            "small",
            driver,
            "singles",
            {"clients": 8, "count": choice.scale.claims, "only_claims": True},
        )
        many = Work(
            f"together.{driver}",
            "small",
            driver,
            "singles",
            {"clients": RUNNERS, "count": choice.scale.together, "only_claims": wanted != OPERATIONS},
        )
        works += [few, many]
        for kind in choice.kinds:
            rates = [(few, 8, "dequeue"), *((many, RUNNERS, operation) for operation in wanted)]
            for work, clients, operation in rates:
                judged = kind in DURABLE and operation == "dequeue" and clients == RUNNERS
                metrics.append(
                    Metric(
                        name=f"{operation}.c{clients}.{driver}.{kind}",
                        unit="calls/s",
                        better="more",
                        ours=Source(work.name, Target(kind), f"{operation}.rate"),
                        peer=choice.peer_source(work.name, f"{operation}.rate"),
                        floor=2.0 if judged else None,
                        target=3.0 if judged else None,
                    )
                )
    return Plan(works, metrics)


def _bulk(choice: Choice) -> Plan:
    """A hundred spans in one call: our route against upstream's own call, and against the bare database."""
    works: list[Work] = []
    metrics: list[Metric] = []
    for clients in (1, 4):
        own: dict[str, Work] = {}
        for driver in ("lean", "upstream"):
            params = {"clients": clients, "requests": choice.scale.single_requests}
            own[driver] = Work(f"many_spans.{driver}.c{clients}", "small", driver, "many_spans", params)
        raw = Work(
            f"raw_spans.c{clients}",
            "small",
            "store",
            "raw_spans",
            {"clients": clients, "requests": choice.scale.bulk_requests},
        )
        works += [*own.values(), raw]
        for form in ("json", "lines"):
            params = {"clients": clients, "requests": choice.scale.bulk_requests, "form": form}
            work = Work(f"bulk.{form}.c{clients}", "small", "lean", "many_spans", params)
            works.append(work)
            for kind in choice.kinds:
                ours = Source(work.name, Target(kind), "spans.rate")
                peers = {"peer_lean": choice.peer_source(own["lean"].name, "spans.rate")}
                metrics.append(
                    Metric(
                        name=f"{work.name}.{kind}",
                        unit="spans/s",
                        better="more",
                        ours=ours,
                        peer=choice.peer_source(own["upstream"].name, "spans.rate"),
                        against="upstream's add_many_spans(100)",
                        floor=20.0 if kind in DURABLE else None,
                        target=40.0 if kind in DURABLE else None,
                        extra={name: source for name, source in peers.items() if source is not None},
                    )
                )
                if kind == "postgres":
                    metrics.append(
                        Metric(
                            name=f"bulk_raw.{form}.c{clients}.{kind}",
                            unit="spans/s",
                            better="more",
                            ours=ours,
                            peer=Source(raw.name, Target(kind, served=False), "spans.rate"),
                            against="raw unnest",
                            floor=0.5,
                            target=0.7,
                        )
                    )
        metrics += [
            Metric(
                name=f"{work.name}.{kind}",
                unit="spans/s, a request each",
                better="more",
                ours=Source(work.name, Target(kind), "spans.rate"),
                peer=choice.peer_source(work.name, "spans.rate"),
            )
            for work in (own[driver] for driver in choice.more_drivers())
            for kind in choice.kinds
        ]
    return Plan(works, metrics)


def _reads(choice: Choice) -> Plan:
    """A thousand spans in one answer; pages of a hundred."""
    works: list[Work] = []
    metrics: list[Metric] = []
    scale = choice.scale
    for driver in choice.more_drivers():
        read = Work(f"read_spans.{driver}", "small", driver, "read_spans", {"requests": scale.reads}, scale.repeats)
        works.append(read)
        metrics += [
            Metric(
                name=f"{read.name}.{kind}",
                unit="spans/s, 1,000 in an answer",
                better="more",
                ours=Source(read.name, Target(kind), "read.median_rate"),
                peer=choice.peer_source(read.name, "read.median_rate"),
                # Upstream's client takes longer to make its records than any server to send them.
                floor=1.5 if kind in DURABLE and driver == "lean" else None,
                target=2.0 if kind in DURABLE and driver == "lean" else None,
            )
            for kind in choice.kinds
        ]
        for size in scale.page_sizes:
            params = {"requests": scale.reads, "at_least": succeeded_among(size)}
            page = Work(f"page.total.{driver}.{size_name(size)}", "seeded", driver, "page", params)
            works.append(page)
            metrics += [
                Metric(
                    name=f"{page.name}.{kind}",
                    unit="pages/s, of 100 with the total",
                    better="more",
                    ours=Source(page.name, Target(kind, size), "page.median_rate"),
                    peer=choice.peer_source(page.name, "page.median_rate", size),
                    floor=5.0 if size >= 100_000 else None,
                    target=8.0 if size >= 100_000 else None,
                )
                for kind in choice.durable()
            ]
    first, *others = scale.plain_sizes
    plain = Work("page.plain", "seeded", "lean", "page", {"requests": scale.reads, "total": False}, scale.repeats)
    works.append(plain)
    metrics += [
        Metric(
            name=f"{plain.name}.{size_name(size)}.{kind}",
            unit="ms, median, without the total",
            better="less",
            ours=Source(plain.name, Target(kind, size), "page.p50"),
            peer=Source(plain.name, Target(kind, first), "page.p50"),
            against=f"at {size_name(first)} rollouts",
            floor=1.3 if size >= 1_000_000 else None,
            target=1.3 if size >= 1_000_000 else None,
        )
        for size in others
        for kind in choice.durable()
    ]
    return Plan(works, metrics)


def _growth(choice: Choice) -> Plan:
    """The hot operations with more and more finished rollouts in the database, by one client."""
    scale = choice.scale
    params = {"clients": 1, "count": scale.growth_calls, "waits": scale.growth_calls}
    work = Work("growth", "seeded", "lean", "singles", params, scale.repeats)
    first, *others = scale.growth_sizes
    metrics = [
        Metric(
            name=f"growth.{operation}.{size_name(size)}.{kind}",
            unit="ms, median",
            better="less",
            ours=Source(work.name, Target(kind, size), f"{operation}.p50"),
            peer=Source(work.name, Target(kind, first), f"{operation}.p50"),
            against=f"at {size_name(first)} rollouts",
            floor=1.3 if size >= 1_000_000 else None,
            target=1.3 if size >= 1_000_000 else None,
        )
        for kind in choice.durable()
        for operation in GROWING
        for size in others
    ]
    return Plan([work], metrics)


def _in_process(choice: Choice) -> Plan:
    """The store without a server: against the bare statement, against PGQueuer, against itself without joining."""
    plans: list[Plan] = []
    calls = choice.scale.store_calls
    if "postgres" in choice.kinds:
        own = Target("postgres", served=False)
        raw = Work("raw_claims", "store", "store", "raw_claims", {"connections": 16, "count": calls})
        queue = Work("pgqueuer", "store", "queue", "drain", {"workers": 2, "count": calls * 2, "batch": 100})
        many = Work(
            "claim_many", "store", "store", "claims", {"coroutines": 2, "count": calls * 2, "join": True, "limit": 100}
        )
        works = [raw, queue, many]
        metrics = [
            Metric(
                name="in_process.claim_many.postgres",
                unit="rollouts/s, 100 a claim",
                better="more",
                ours=Source(many.name, own, "claim.rate"),
                peer=Source(queue.name, own, "jobs.rate") if choice.peer else None,
                against="PGQueuer, batches of 100",
                floor=1.5,
                target=2.0,
            )
        ]
        for join, name, floor, target in ((False, "alone", 0.55, 0.65), (True, "joined", 2.5, 4.0)):
            work = Work(f"claim.{name}", "store", "store", "claims", {"coroutines": 16, "count": calls, "join": join})
            works.append(work)
            metrics.append(
                Metric(
                    name=f"in_process.claim.{name}.postgres",
                    unit="claims/s, 16 at once",
                    better="more",
                    ours=Source(work.name, own, "claim.rate"),
                    peer=Source(raw.name, own, "claim.rate"),
                    against="raw statement",
                    floor=floor,
                    target=target,
                )
            )
        plans.append(Plan(works, metrics))
    if "sqlite" in choice.kinds:
        own = Target("sqlite", served=False)
        params = {"coroutines": RUNNERS, "count": calls // 2}
        works = [
            Work(f"operations.{name}", "store", "store", "operations", params | {"join": join})
            for join, name in ((False, "alone"), (True, "joined"))
        ]
        metrics = [
            Metric(
                name=f"in_process.{operation}.joined.sqlite",
                unit=f"calls/s, {RUNNERS} at once",
                better="more",
                ours=Source("operations.joined", own, f"{operation}.rate"),
                peer=Source("operations.alone", own, f"{operation}.rate"),
                against="a transaction a call",
                floor=4.0,
                target=5.0,
            )
            for operation in ("enqueue", "dequeue", "span", "update")
        ]
        plans.append(Plan(works, metrics))
    return joined(plans)


def _tracking(choice: Choice) -> Plan:
    """What it costs to take down metrics."""
    if "lean" not in choice.drivers:
        return Plan([], [])
    params = {"runners": RUNNERS, "seconds": choice.scale.cycle_seconds}
    work = Work("tracking.lean", "tracking", "lean", "cycle", params, repeats=choice.scale.repeats)
    figures: Sequence[tuple[str, str, Better, float]] = (
        ("rate", "cycles/s", "more", 0.95),
        ("cpu", "ms CPU a cycle", "less", 1.05),
    )
    metrics = [
        Metric(
            name=f"tracking.{value}.{kind}",
            unit=unit,
            better=better,
            ours=Source(work.name, Target(kind, tracked=True), f"cycle.{value}"),
            peer=Source(work.name, Target(kind), f"cycle.{value}"),
            against="without metrics",
            floor=floor,
        )
        for kind in choice.durable()
        for value, unit, better, floor in figures
    ]
    return Plan([work], metrics)


def whole_plan(choice: Choice) -> Plan:
    """Everything that can be measured of a choice."""
    return joined(make(choice) for make in (_cycles, _alone, _together, _bulk, _reads, _growth, _in_process, _tracking))


def chosen_kinds(names: str) -> list[Kind]:
    """The stores that a list with commas names, in the usual order.

    Raises:
        ValueError: one of them does not exist.
    """
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    unknown = wanted.difference(OURS)
    if unknown or not wanted:
        raise ValueError(f"{', '.join(sorted(unknown)) or 'nothing'} is none of {', '.join(OURS)}")
    return [kind for kind in OURS if kind in wanted]

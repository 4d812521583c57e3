"""What a server acknowledged, as its callers noted it, and what of that a database does not have.

A caller writes down an answer when it has it, so that everything in a ledger was acknowledged. What was
done without an answer is in no ledger. Callers whose calls carry keys make them until they are answered,
so that nothing may be in the database which is not in their ledger either.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_sql.store.sql_store import SqlStore
from tests.native_laws import broken_laws, rows_of

__all__ = ["Ledger", "Notebook", "Report", "check", "read"]

ATTEMPTS = "SELECT rollout_id, attempt_id, sequence_id, status, worker_id FROM attempts WHERE partition_id = :partition"
SPANS = """
SELECT rollout_id, attempt_id, span_id, count(*) FROM spans WHERE partition_id = :partition
GROUP BY rollout_id, attempt_id, span_id
"""
ROLLOUTS = "SELECT rollout_id, status, CAST(input AS text) FROM rollouts WHERE partition_id = :partition"
RESOURCES = "SELECT resources_id, version FROM resources WHERE partition_id = :partition"


class Notebook:
    """Where one process writes down what it was told, a line at a time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def note(self, what: str, *details: Any) -> None:
        """Write down an answer; it is in the file when this returns."""
        self._file.write(json.dumps([what, *details]) + "\n")
        self._file.flush()


@dataclass
class Ledger:
    """Everything that was acknowledged."""

    enqueued: set[str] = field(default_factory=set[str])
    claims: list[tuple[str, str, int]] = field(default_factory=list[tuple[str, str, int]])
    """Rollout, attempt and its number, once for each caller that was given it."""
    spans: set[tuple[str, str, str]] = field(default_factory=set[tuple[str, str, str]])
    ends: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    """The last status that was acknowledged of an attempt."""
    resources: dict[str, int] = field(default_factory=dict[str, int])
    """The highest version that was acknowledged."""
    failures: Counter[str] = field(default_factory=Counter[str])
    """How many calls of a crew had no answer in the end."""

    def add(self, what: str, details: Sequence[Any]) -> None:
        """Add a line."""
        match what:
            case "enqueue":
                self.enqueued.update(details)
            case "claim":
                rollout_id, attempt_id, number = details
                self.claims.append((rollout_id, attempt_id, number))
            case "spans":
                rollout_id, attempt_id, *span_ids = details
                self.spans.update((rollout_id, attempt_id, span_id) for span_id in span_ids)
            case "end":
                rollout_id, attempt_id, status = details
                self.ends[rollout_id, attempt_id] = status
            case "resources":
                resources_id, version = details
                self.resources[resources_id] = max(version, self.resources.get(resources_id, 0))
            case "failure":
                self.failures[details[0]] += 1
            case _:
                raise ValueError(f"no ledger has lines of {what!r}")


def read(paths: Iterable[Path]) -> Ledger:
    """What the notebooks of some processes say together."""
    ledger = Ledger()
    for path in paths:
        # The last line may still be on its way.
        for line in path.read_text().split("\n")[:-1]:
            what, *details = json.loads(line)
            ledger.add(what, details)
    return ledger


@dataclass
class Report:
    """What is wrong, and how much was looked at."""

    lost: list[str] = field(default_factory=list[str])
    double: list[str] = field(default_factory=list[str])
    gaps: list[str] = field(default_factory=list[str])
    orphans: list[str] = field(default_factory=list[str])
    """What calls with keys did, and nobody was told of."""
    broken: list[str] = field(default_factory=list[str])
    """Other laws, as `tests.native_laws` words them."""
    counts: Counter[str] = field(default_factory=Counter[str])

    @property
    def wrong(self) -> list[str]:
        """All of it."""
        return [*self.lost, *self.double, *self.gaps, *self.orphans, *self.broken]


def _is_keyed(name: str) -> bool:
    """Whether a crew, or a worker of one, uses our own client."""
    return name.startswith("own")


def _task_of(stored: str | None) -> str:
    """Whose a rollout is, by its input; that of nobody's crew may be anything."""
    content = None if stored is None else json.loads(stored)
    return str(content.get("task", "")) if isinstance(content, dict) else ""


async def check(ledger: Ledger, store: SqlStore) -> Report:
    """Compare a ledger with the database of a store that nobody writes to any more."""
    report = Report()
    rollouts = {row[0]: tuple(row[1:]) for row in await rows_of(store, ROLLOUTS)}
    attempts = {(row[0], row[1]): tuple(row[2:]) for row in await rows_of(store, ATTEMPTS)}
    spans = {tuple(row[:3]): row[3] for row in await rows_of(store, SPANS)}
    resources = dict(await rows_of(store, RESOURCES))

    report.lost += [f"enqueued rollout {rollout_id}" for rollout_id in ledger.enqueued - rollouts.keys()]
    for rollout_id, attempt_id, number in ledger.claims:
        found = attempts.get((rollout_id, attempt_id))
        if found is None or found[0] != number:
            report.lost.append(f"claim {number} of {rollout_id} as {attempt_id}: there is {found}")
    report.lost += [f"span {span}" for span in ledger.spans - spans.keys()]
    for key, status in ledger.ends.items():
        found = attempts.get(key)
        if found is None or found[1] != status:
            report.lost.append(f"end of attempt {key} as {status}: there is {found}")
    for resources_id, version in ledger.resources.items():
        if resources.get(resources_id, 0) < version:
            report.lost.append(f"version {version} of resources {resources_id}: there is {resources.get(resources_id)}")

    entries = Counter((rollout_id, number) for rollout_id, _, number in ledger.claims)
    report.double += [
        f"queue entry {entry} was given to {count} callers" for entry, count in entries.items() if count > 1
    ]
    report.double += [f"span {span} is stored {count} times" for span, count in spans.items() if count != 1]

    numbers: dict[str, list[int]] = {}
    for (rollout_id, _), (number, *_) in attempts.items():
        numbers.setdefault(rollout_id, []).append(number)
    for rollout_id, found in numbers.items():
        if sorted(found) != list(range(1, len(found) + 1)):
            report.gaps.append(f"the attempts of {rollout_id} are numbered {sorted(found)}")

    claimed = {(rollout_id, attempt_id) for rollout_id, attempt_id, _ in ledger.claims}
    report.orphans += [
        f"rollout {rollout_id}"
        for rollout_id, (_, task) in rollouts.items()
        if _is_keyed(_task_of(task)) and rollout_id not in ledger.enqueued
    ]
    # Other rollouts have limits so short that the watchdog may end an attempt before its claim can be answered.
    report.orphans += [
        f"attempt {row} of {key}"
        for key, row in attempts.items()
        if _is_keyed(row[2] or "") and _is_keyed(_task_of(rollouts.get(key[0], ("", None))[1])) and key not in claimed
    ]
    report.orphans += [f"{count} calls of {name}" for name, count in ledger.failures.items() if _is_keyed(name)]

    report.broken = await broken_laws(store, time.time())
    report.counts.update(
        rollouts=len(rollouts),
        enqueued=len(ledger.enqueued),
        claims=len(ledger.claims),
        spans=len(ledger.spans),
        ends=len(ledger.ends),
        resources=len(ledger.resources),
        finished=sum(status == "succeeded" for status, _ in rollouts.values()),
        unanswered=ledger.failures.total(),
        attempts=len(attempts),
    )
    return report

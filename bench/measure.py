"""Runs a plan: starts what is measured, lets the drivers loose on it in turn, and gathers what they say."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from bench.plan import Plan, Work, rotated
from bench.processes import Driver, abandon, driver
from bench.results import Samples
from bench.scale import Scale
from bench.servers import Endpoint, Places, Target

STARTED_AT_ONCE: Final = 4

Progress = Callable[[str, int], None]
"""Told what is being done, and how many pieces of work were finished since."""


class Drivers:
    """The driver processes of a run, each started when it is first asked for."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, peer_python: str | None) -> None:
        self._stack = stack
        self._folder = folder
        self._peer_python = peer_python
        self._running: dict[str, Driver] = {}

    def of(self, kind: str) -> Driver:
        """The driver of a kind."""
        if kind not in self._running:
            python = self._peer_python if kind in ("upstream", "queue") else None
            log = self._folder / f"driver-{kind}.log"
            self._running[kind] = self._stack.enter_context(driver(python or sys.executable, kind, log))
        return self._running[kind]


def steps(plan: Plan, rounds: int) -> int:
    """How many pieces of work a plan has."""
    return rounds * sum(work.repeats * len(plan.targets_of(work)) for work in plan.works)


def measure(plan: Plan, scale: Scale, places: Places, progress: Progress) -> Samples:
    """Do all of a plan, every target once in each round and in an order that rotates.

    Raises:
        BenchError: something could not be started, or a driver broke.
    """
    samples = Samples()
    with contextlib.ExitStack() as stack:
        drivers = Drivers(stack, places.folder, places.peer_python)
        for fleet in plan.fleets:
            works = plan.works_of(fleet)
            targets = dict.fromkeys(target for work in works for target in plan.targets_of(work))
            with _opened(list(targets), places, progress) as endpoints:
                _warm_up(endpoints, scale, drivers, samples, progress)
                # What filling left to be written would otherwise be written while others are measured.
                os.sync()
                for number, work, target in _turns(plan, works, scale.rounds):
                    progress(f"round {number + 1}: {work.name} on {target}", 0)
                    _do(work, target, endpoints[target], drivers, samples)
                    progress("", 1)
    return samples


def _turns(plan: Plan, works: Sequence[Work], rounds: int) -> Iterator[tuple[int, Work, Target]]:
    """Who is measured when: in every round each work on all its targets, which take turns in going first."""
    for number in range(rounds):
        for work in works:
            targets = plan.targets_of(work)
            for repeat in range(work.repeats):
                for target in rotated(targets, number * work.repeats + repeat):
                    yield number, work, target


@contextlib.contextmanager
def _opened(targets: list[Target], places: Places, progress: Progress) -> Iterator[dict[Target, Endpoint | str]]:
    """Start the targets, several at a time, and stop all that were started, also when one was not."""
    places_of = {target: places.open(target) for target in targets}
    with ThreadPoolExecutor(STARTED_AT_ONCE) as executor:
        progress(f"starting {', '.join(map(str, targets))}", 0)
        starting = {target: executor.submit(place.__enter__) for target, place in places_of.items()}
        try:
            yield {target: future.result() for target, future in starting.items()}
        except BaseException:
            abandon()
            raise
        finally:
            progress("stopping the servers", 0)
            for future in starting.values():
                future.cancel()
            futures.wait(starting.values())
            begun = [target for target, future in starting.items() if not future.cancelled() and not future.exception()]
            stopping = [executor.submit(places_of[target].__exit__, None, None, None) for target in begun]
            for future in stopping:
                future.result()


def _warm_up(
    endpoints: dict[Target, Endpoint | str], scale: Scale, drivers: Drivers, samples: Samples, progress: Progress
) -> None:
    for target, endpoint in endpoints.items():
        if isinstance(endpoint, Endpoint) and endpoint.base_url is not None:
            progress(f"warming up {target}", 0)
            work = Work("warm-up", "", "lean", "warm_up", {"seconds": scale.warm_up_seconds})
            _do(work, target, endpoint, drivers, samples)


def _do(work: Work, target: Target, endpoint: Endpoint | str, drivers: Drivers, samples: Samples) -> None:
    if isinstance(endpoint, str):
        samples.unavailable(work, target, endpoint)
        return
    outcome = drivers.of(work.driver).run(
        {
            "job": work.job,
            "base_url": endpoint.base_url,
            "database_url": endpoint.database_url,
            "watched": endpoint.watched,
            "params": work.params,
        }
    )
    samples.add(work, target, outcome)

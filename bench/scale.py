"""How much is measured: the whole comparison, or a quick look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Numbers of calls and sizes.

    Attributes:
        rounds: how often each target is measured.
        warm_up_seconds: of cycles on each server before it is measured.
        cycle_seconds: how long the runners work.
        alone: calls of each kind by one client.
        together: calls of each kind by 32 clients.
        claims: by 8 clients.
        waits: look-ups of a hundred rollouts.
        commits: bare one-row commits.
        bulk_requests: batches of spans by each client through our route.
        single_requests: batches of spans by each client, a request per span.
        reads: answers of a thousand spans, and pages.
        page_sizes: how many rollouts there are when a page is compared with the peer's.
        plain_sizes: likewise when it is compared with a smaller database of ours.
        growth_sizes: how many rollouts there are, the first being what the others are compared with.
        growth_calls: calls of each kind at each size, each time.
        repeats: how often, in turn, in a round, what is compared with itself on a smaller database.
        store_calls: calls of each kind without a server.
        every_driver: whether both drivers make all calls, rather than those whose ratios matter most.
    """

    rounds: int
    warm_up_seconds: float
    cycle_seconds: float
    alone: int
    together: int
    claims: int
    waits: int
    commits: int
    bulk_requests: int
    single_requests: int
    reads: int
    page_sizes: tuple[int, ...]
    plain_sizes: tuple[int, ...]
    growth_sizes: tuple[int, ...]
    growth_calls: int
    repeats: int
    store_calls: int
    every_driver: bool


FULL: Final = Scale(
    rounds=3,
    warm_up_seconds=2.0,
    cycle_seconds=6.0,
    alone=500,
    together=1500,
    claims=1000,
    waits=200,
    commits=500,
    bulk_requests=100,
    single_requests=6,
    reads=40,
    page_sizes=(10_000, 100_000),
    plain_sizes=(10_000, 1_000_000),
    growth_sizes=(1_000, 10_000, 100_000, 1_000_000),
    growth_calls=100,
    repeats=4,
    store_calls=8000,
    every_driver=True,
)

QUICK: Final = Scale(
    rounds=1,
    warm_up_seconds=0.3,
    cycle_seconds=1.5,
    alone=80,
    together=160,
    claims=160,
    waits=10,
    commits=100,
    bulk_requests=6,
    single_requests=1,
    reads=10,
    page_sizes=(10_000,),
    plain_sizes=(1_000, 10_000),
    growth_sizes=(1_000, 10_000),
    growth_calls=40,
    repeats=1,
    store_calls=1600,
    every_driver=False,
)

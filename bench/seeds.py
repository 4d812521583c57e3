"""The finished rollouts that a database is filled with; the same ones wherever it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

SCRAMBLE: Final = 2_654_435_769_001
"""Odd, so that multiplying by it modulo a power of two maps no two numbers to one; small enough that a
million of them stays below 2⁶³, the limit of a database's integers."""
MASK: Final = 2**48 - 1
FIRST_TIME: Final = 1_700_000_000.0
SECONDS_APART: Final = 0.25
SUCCEEDED_OF_TEN: Final = 7


@dataclass(frozen=True, slots=True)
class Seed:
    """What is known of a rollout before it is made, and of its only attempt. Ids are spread as random ones are."""

    rollout_id: str
    attempt_id: str
    status: Literal["succeeded", "failed"]
    start_time: float
    end_time: float


def seed_of(number: int) -> Seed:
    """The rollout of a number from 1 on."""
    spread = number * SCRAMBLE & MASK
    start = FIRST_TIME + number * SECONDS_APART
    status = "succeeded" if number % 10 < SUCCEEDED_OF_TEN else "failed"
    return Seed(f"ro-{spread:012x}", f"at-{spread & 0xFFFFFFFF:08x}", status, start, start + 1)


def succeeded_among(rollouts: int) -> int:
    """How many of so many are succeeded."""
    return sum(number % 10 < SUCCEEDED_OF_TEN for number in range(1, rollouts + 1))

"""What the sleeps of a workload allow."""

import math
from typing import Any

import pytest

from bench import ideal
from bench.ideal import sleeps_allow
from bench.presets import PRESETS, Mode, Workload
from bench.traces import Step

TASKS = 12


@pytest.fixture(autouse=True)
def one_second_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task sleeps a second, but for the last one, which sleeps three."""

    def steps(task: int, max_rounds: int, sleep_seconds: float) -> list[Step]:
        length = (3.0 if task == TASKS - 1 else 1.0) if sleep_seconds else 0.0
        return [Step("a", length / 2), Step("b"), Step("c", length / 2)]

    sleeps_allow.cache_clear()
    monkeypatch.setattr(ideal, "steps_of", steps)


def workload(mode: Mode, runners: int, *, sleep: float = 1.0, **more: Any) -> Workload:
    return Workload(mode=mode, total_tasks=TASKS, n_runners=runners, max_rounds=1, sleep_seconds=sleep, **more)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (workload("batch", 1, batch_size=4), 14),
        (workload("batch", 4, batch_size=4), 5),
        (workload("batch", 3, batch_size=4), 2 + 2 + 4),
        (workload("batch", 50, batch_size=12), 3),
        (workload("batch", 50, batch_size=5), 1 + 1 + 3),
        (workload("batch_partial", 4, batch_size=4, remaining_tasks=0), 5),
        (workload("batch_partial", 50, batch_size=4, remaining_tasks=8), 3),
        (workload("single", 50, concurrency=2), 5 + 3),
        (workload("single", 3, concurrency=50), 3 + 3),
    ],
)
def test_what_the_sleeps_allow(given: Workload, seconds: float) -> None:
    assert sleeps_allow(given) == pytest.approx(TASKS / seconds)


def test_what_does_not_sleep_is_not_held_by_it() -> None:
    assert sleeps_allow(workload("batch", 2, batch_size=4, sleep=0.0)) == math.inf


def test_a_single_wave_is_as_long_as_its_longest_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    scaled = PRESETS["heavy-traces"].scaled(0.05)
    assert scaled.total_tasks < scaled.n_runners
    assert sleeps_allow(scaled) < scaled.ceiling

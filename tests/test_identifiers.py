"""Fresh ids: their form, that none comes twice, and that rollouts that are made together lie together."""

import itertools
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_sql import identifiers
from lightning_sql.identifiers import new_attempt_id, new_resources_id, new_rollout_id


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (new_rollout_id, r"ro-[0-9a-f]{12}"),
        (new_attempt_id, r"at-[0-9a-f]{8}"),
        (new_resources_id, r"rs-[0-9a-f]{12}"),
    ],
)
def test_ids_have_the_protocols_form(make: Callable[[], str], form: str) -> None:
    assert all(re.fullmatch(form, make()) for _ in range(200))


def test_no_rollout_id_comes_twice() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: [new_rollout_id() for _ in range(5000)], range(8)))
    assert len({id_ for ids in made for id_ in ids}) == 40_000


def test_rollouts_that_are_made_together_are_neighbours() -> None:
    ids = [new_rollout_id() for _ in range(20_000)]
    # Five runs of 4096 at most begin and end within so many, and each is in the order of its making.
    assert len({id_[:9] for id_ in ids}) <= 6
    assert sum(later < earlier for earlier, later in itertools.pairwise(ids)) <= 5


def test_two_runs_have_nothing_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {new_rollout_id()[:9] for _ in range(10)}
    monkeypatch.setattr(identifiers, "_next_rollout", identifiers._Neighbours())
    assert first.isdisjoint(new_rollout_id()[:9] for _ in range(10))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_has_ids_of_its_own() -> None:
    reading, writing = os.pipe()
    new_rollout_id()
    child = os.fork()
    if child == 0:
        os.write(writing, " ".join([made() for _ in range(20) for made in (new_rollout_id, new_attempt_id)]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        theirs = set(pipe.read().split())
    assert os.waitpid(child, 0)[1] == 0
    ours = {made() for _ in range(20) for made in (new_rollout_id, new_attempt_id)}
    assert len(theirs) == len(ours) == 40
    assert not ours & theirs
    assert not {id_[:9] for id_ in ours if id_.startswith("ro")} & {id_[:9] for id_ in theirs if id_.startswith("ro")}

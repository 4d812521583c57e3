"""Nothing acknowledged is lost, nothing is given out twice, whatever goes wrong meanwhile."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lightning_sql.testing.postgres import PostgresCluster, postgres_cluster
from tests.faults.stage import FAULTS, OF_THE_DATABASE, Stage, faults_on, stage_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

RUNNERS = 12
MOST_TURNS = 15
"""How often a fault may fall until it brings to light what is wrong: on a busy machine little is on its way."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresCluster]:
    # A database that is killed must have its work on disk, as in production.
    with postgres_cluster(settings={"fsync": "on"}) as started:
        yield started


@pytest.fixture(params=["sqlite", "postgres"])
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    if request.param == "sqlite":
        async with stage_on(f"sqlite:///{tmp_path / 'faults.db'}", tmp_path, servers=2) as stage:
            yield stage
        return
    started: PostgresCluster = request.getfixturevalue("cluster")
    url = started.create_database()
    async with stage_on(url, tmp_path, cluster=started, servers=2) as stage:
        yield stage


async def test_nothing_is_lost(stage: Stage) -> None:
    for kind in ("own", "upstream"):
        await stage.hire(kind, RUNNERS)
    await stage.warm()
    for fault in faults_on(stage.cluster):
        await stage.suffer(fault)
        await asyncio.sleep(0.5)
    await asyncio.sleep(2)
    await stage.dismiss()
    for server in stage.servers:
        assert await server.end(signal.SIGTERM) == 0
    report = await stage.verdict()
    assert report.wrong == []
    assert report.counts["finished"] > 100
    assert report.counts["ends"] > 100


BROKEN = {
    "acknowledge_early": ("kill_a_server", "stop_a_server"),
    "guess": ("kill_the_database", "end_sessions", "fill_the_file"),
    "undo": ("drop_sessions", "half_close_sessions"),
    "forget_keys": ("drop_clients", "half_close_clients", "kill_a_server"),
    "give_back": ("drop_clients", "half_close_clients", "hang_up"),
    "wake_confused": ("freeze_a_server",),
}
"""Servers of `tests.faults.broken`, and the faults that bring to light what they do wrong."""


LATE = ("acknowledge_early", "forget_keys")
"""What these do wrong shows when everybody has stopped working."""


def test_every_fault_is_known_to_be_noticed() -> None:
    assert {fault for faults in BROKEN.values() for fault in faults} == FAULTS.keys()


@pytest.mark.parametrize(("mode", "fault"), [(mode, fault) for mode, faults in BROKEN.items() for fault in faults])
async def test_a_broken_server_is_caught(mode: str, fault: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    started: PostgresCluster | None = None
    url = f"sqlite:///{tmp_path / 'broken.db'}"
    if fault in OF_THE_DATABASE:
        started = request.getfixturevalue("cluster")
        assert started is not None
        url = started.create_database()
    async with stage_on(url, tmp_path, cluster=started, module=("tests.faults.broken", mode)) as stage:
        await stage.hire("own", 2 * RUNNERS)
        await stage.warm()
        for turn in range(MOST_TURNS):
            await stage.suffer(fault)
            await asyncio.sleep(0.3)
            # What is late is not lost yet, so that an early acknowledgement is judged in the end.
            if turn >= 2 and (mode in LATE or await caught(stage)):
                break
        await stage.dismiss()
        for server in stage.servers:
            await server.end(signal.SIGKILL)
        assert await caught(stage) or (mode == "forget_keys" and (await stage.verdict()).orphans)


async def caught(stage: Stage) -> bool:
    """Whether something is missing, or was given out twice; also while the crews work."""
    report = await stage.verdict()
    return bool(report.lost or report.double)


async def test_a_server_that_seems_right_is_right_while_nothing_happens(tmp_path: Path) -> None:
    # So that what the test above catches is what the faults bring about. An early acknowledgement needs time.
    for mode in BROKEN:
        folder = tmp_path / mode
        folder.mkdir()
        async with stage_on(f"sqlite:///{folder / 'calm.db'}", folder, module=("tests.faults.broken", mode)) as stage:
            await stage.hire("own", RUNNERS)
            await stage.warm()
            await stage.dismiss()
            await asyncio.sleep(1)
            for server in stage.servers:
                await server.end(signal.SIGKILL)
            report = await stage.verdict()
        if mode != "give_back":  # whose crew hangs up in the end
            assert report.lost == report.double == report.orphans == []

"""Ten times more calls than a server can take; the long form, with figures, is a command."""

from pathlib import Path

import pytest

from lightning_sql.testing.postgres import PostgresServer
from tests.faults.overload import overload

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

SECONDS = 2.0
MORE_BYTES = 300_000_000
"""What 256 calls of this kind cannot take, and thousands can."""


def url_of(dialect: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if dialect == "sqlite":
        return f"sqlite:///{folder / 'overload.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create_database()


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
async def test_what_is_too_much_is_refused(dialect: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    outcome = await overload(url_of(dialect, request, tmp_path), tmp_path, SECONDS)
    assert outcome.wrong == []
    assert outcome.memory["overload"] < outcome.memory["capacity"] + MORE_BYTES
    assert outcome.phases["overload"]["answers"]["done"] > 0
    assert outcome.phases["recovery"]["answers"]["done"] > 0


async def test_a_server_without_a_bound_is_caught(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'unbounded.db'}"
    outcome = await overload(url, tmp_path, SECONDS, module=("tests.faults.broken", "take_everything"))
    assert "nothing was refused" in outcome.wrong

"""Fixtures for the tests with the whole of Agent Lightning, in an environment of its own."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "api")]
# Its dependencies would otherwise ask the network for a price list when they are imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from lightning_sql.testing.postgres import PostgresServer, postgres_server  # noqa: E402


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of the kind that the test is parametrized with."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'lightning.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    database = server.create_database()
    yield database
    server.drop_database(database)

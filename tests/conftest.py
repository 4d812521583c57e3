"""Fixtures that every test may use: databases that are fresh and empty, on real servers."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from lightning_sql.testing.postgres import SOURCE_VARIABLE, PostgresCluster, PostgresServer
from lightning_sql.testing.postgres import postgres_cluster as start_cluster
from lightning_sql.testing.postgres import postgres_server as start_server

# What the developer's shell sets for a real server must not reach the tests or the servers that they start.
_SCRUBBED = re.compile(r"LIGHTNING_SQL_|OTEL_|PG[A-Z]+$")
for _name in [name for name in os.environ if _SCRUBBED.match(name) and name != SOURCE_VARIABLE]:
    del os.environ[_name]

# Upstream's dependencies would otherwise ask the network for a price list when they are imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

# Databases make single examples slow; how slow is no property of the code under test. The same code is tested with the
# same examples each time, so that what a change broke is not confused with what nobody had come upon before.
settings.register_profile(
    "databases",
    deadline=None,
    print_blob=True,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# `make properties` asks for this one, which looks for what nobody had come upon; each property says itself how few
# examples do in every run of the tests.
settings.register_profile("long", settings.get_profile("databases"), max_examples=5000, derandomize=False)
settings.load_profile("databases")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for the whole session (of each xdist worker); it may be one that others use too."""
    with start_server() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """The URL of a fresh, empty PostgreSQL database."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def postgres_cluster() -> Iterator[PostgresCluster]:
    """A PostgreSQL server of the test's own, to stop, kill and start again."""
    with start_cluster() as cluster:
        yield cluster


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of an SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'lightning.db'}"

"""Fixtures of the database tests."""

import pytest

from tests.backends import database_of, prepared_postgres, prepared_sqlite

__all__ = ["database_of", "prepared_postgres", "prepared_sqlite"]


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_url")

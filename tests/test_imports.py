"""Importing the library stays cheap: nothing comes along that is not needed yet."""

import subprocess
import sys

import pytest

HEAVY = ("litestar", "uvicorn", "aiohttp", "alembic", "asyncpg", "aiosqlite", "agentlightning", "opentelemetry", "rich")


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize(
    "statement", ["import lightning_sql", "from lightning_sql import open_store, LightningStore, CollectionStore"]
)
def test_the_library_brings_nothing_heavy(statement: str) -> None:
    loaded = modules_after(statement)
    assert "lightning_sql" in loaded
    assert loaded.isdisjoint(HEAVY), loaded.intersection(HEAVY)


def test_the_public_names_are_what_the_package_promises() -> None:
    import lightning_sql

    for name in lightning_sql.__all__:
        assert getattr(lightning_sql, name) is not None
    with pytest.raises(AttributeError):
        lightning_sql.nothing_of_this_name  # noqa: B018

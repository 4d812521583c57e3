"""What tests of migrations do behind the store's back."""

from typing import Any

from sqlalchemy import Executable, text

from lightning_sql.database.engine import Database


async def run(database_url: str, *statements: Executable) -> list[Any]:
    """Run statements in one transaction; the rows of the last one, if it has any."""
    database = Database(database_url)
    try:
        with database.translated():
            async with database.transaction(writing=True) as connection:
                results = [await connection.execute(statement) for statement in statements]
                return list(results[-1].all()) if results[-1].returns_rows else []
    finally:
        await database.close()


async def execute(database_url: str, statement: str) -> None:
    await run(database_url, text(statement))

"""What Alembic runs: on the connection it is handed, or, from its own command line, on LIGHTNING_SQL_DATABASE_URL."""

from __future__ import annotations

import asyncio
import os

from alembic import context
from sqlalchemy import Connection

from lightning_sql.database.engine import Database
from lightning_sql.database.migrate import METADATA


def run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=METADATA, compare_type=True, render_as_batch=True)
    context.run_migrations()


async def run_from_command_line() -> None:
    database = Database(os.environ.get("LIGHTNING_SQL_DATABASE_URL", "sqlite:///lightning.db"), reflection=True)
    await database.dialect.prepare(database.url)
    try:
        async with database.transaction(writing=True) as connection:
            await connection.run_sync(run)
    finally:
        await database.close()


connection = context.config.attributes.get("connection")
if connection is None:
    asyncio.run(run_from_command_line())
else:
    run(connection)

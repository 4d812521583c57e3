"""The `lightning-sql` command."""

# rich_click leaves out a type parameter of click's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import rich_click as click
from typing_extensions import override

from lightning_sql import __version__
from lightning_sql.errors import LightningError

if TYPE_CHECKING:
    from lightning_api.settings import Settings

__all__ = ["cli", "main"]

T = TypeVar("T")

EXIT_CONFIGURATION: Final = 2
EXIT_DRIFT: Final = 1
EXIT_FAILURE: Final = 1

_PLAIN_WORD: Final = re.compile(r"[a-z-]+")

_database_url: Final = click.option("--database-url", metavar="URL", help="sqlite:///…, postgresql://…, memory://")


class _Command(click.RichCommand):
    """A command whose complaints about its arguments do not repeat them: a URL or a token may be among them."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = [word for argument in args for word in (argument, argument.partition("=")[2])]
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise _withheld(error, (word for word in given if not word.startswith("-"))) from None


class _Group(click.RichGroup):
    """A group of such commands."""

    command_class = _Command
    group_class = type

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            # A word that looks like the name of a command is a mistyped one.
            raise _withheld(error, (word for word in args if not _PLAIN_WORD.fullmatch(word))) from None


def _withheld(error: click.UsageError, words: Iterable[str]) -> click.UsageError:
    """The same complaint without these words."""
    message = error.message
    for word in sorted(filter(None, words), key=len, reverse=True):
        message = message.replace(word, "…")
    return error if message == error.message else click.UsageError(message, error.ctx)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="lightning-sql %(version)s")
def cli() -> None:
    """A durable store for Agent Lightning, in SQL."""


@cli.command()
@_database_url
@click.option("--host", metavar="ADDRESS", help="Where to listen (127.0.0.1).")
@click.option("--port", type=int, metavar="PORT", help="4747; 0 takes any free one.")
@click.option("--workers", type=int, metavar="N", help="Server processes (1).")
@click.option("--partition", metavar="NAME", help="Which store of the database (default).")
@click.option("--scan-debounce-seconds", type=float, metavar="S", help="Least time between two scans (10).")
@click.option("--claim-timeout-seconds", type=float, metavar="S", help="End claims silent for this (none).")
@click.option("--database-wait-seconds", type=float, metavar="S", help="Longest wait for the database (40).")
@click.option("--cors-origin", "cors_origins", multiple=True, metavar="ORIGIN", help="Repeatable; * is any.")
@click.option("--token", metavar="TOKEN", help="Bearer token to ask callers for.")
@click.option("--log-level", metavar="LEVEL", help="debug, info, warning, error (info).")
@click.option("--tracker", metavar="NAME", help="prometheus, console: metrics (none).")
@click.option("--body-limit", type=int, metavar="BYTES", help="Largest request body (64 MiB).")
# Rarely needed, and the help is to fit a screen; the README has them.
@click.option("--max-requests", type=int, hidden=True)
@click.option("--max-request-bytes", type=int, hidden=True)
@click.option("--compress", metavar="WHEN", help="auto, on, off: gzip large answers (auto).")
@click.option("--allow-public", is_flag=True, default=None, help="Be reachable without a token.")
def serve(**flags: Any) -> None:
    """Serve the store. Options can also be variables, as in LIGHTNING_SQL_PORT."""

    def run() -> None:
        settings = _settings(**flags)
        # Imported late, so that `--help` and a wrong flag need not wait for a web framework.
        from lightning_api.serve import run as run_service

        run_service(settings)

    _reporting_errors(run)


@cli.command()
@click.option("--host", metavar="ADDRESS", default="0.0.0.0", help="Where to listen (0.0.0.0).")  # noqa: S104
@click.option("--port", type=int, metavar="PORT", default=4748, help="4748; 0 takes any free one.")
@click.option("--metrics-path", metavar="PATH", default="/v1/prometheus", help="Where they are (/v1/prometheus).")
@click.option("--token", metavar="TOKEN", help="Bearer token to ask for (LIGHTNING_SQL_TOKEN).")
@click.option("--log-level", metavar="LEVEL", help="debug, info, warning, error (info).")
@click.option("--access-log", is_flag=True, help="Log each request.")
def prometheus(**options: Any) -> None:
    """Serve the metrics in PROMETHEUS_MULTIPROC_DIR, apart from the server."""

    def run() -> None:
        from lightning_api.exporter import ExporterOptions, run_exporter

        run_exporter(ExporterOptions(**options), os.environ)

    _reporting_errors(run)


@cli.command()
@click.option("--url", metavar="URL", help="A running server to aim at (a temporary SQLite file of its own).")
@click.option("--token", metavar="TOKEN", envvar="LIGHTNING_SQL_TOKEN", help="The server's bearer token.")
@click.option("--rollouts", type=click.IntRange(1), default=200, metavar="N", help="How many to enqueue (200).")
@click.option("--runners", type=click.IntRange(1), default=8, metavar="N", help="How many work at once (8).")
@click.option("--seed", type=int, default=0, metavar="N", help="Of the simulated failures (0).")
def demo(**options: Any) -> None:
    """Watch simulated runners work through a queue of rollouts."""

    def run() -> None:
        from lightning_api.demo import DemoOptions, run_demo

        if not run_demo(DemoOptions(**options)).sound:
            sys.exit(EXIT_DRIFT)

    _reporting_errors(run)


@cli.group()
def migrate() -> None:
    """Bring a database's schema up to date, or look at it."""


@migrate.command("up")
@_database_url
@click.argument("revision", default="head")
def migrate_up(database_url: str | None, revision: str) -> None:
    """Upgrade the schema to the newest revision, or to REVISION."""
    _on_migrations(database_url, lambda migrations: migrations.upgrade(revision))
    _show_current(database_url)


@migrate.command("down")
@_database_url
@click.argument("revision")
def migrate_down(database_url: str | None, revision: str) -> None:
    """Downgrade the schema to REVISION (`base`: to nothing, losing what is stored)."""
    _on_migrations(database_url, lambda migrations: migrations.downgrade(revision))
    _show_current(database_url)


@migrate.command("current")
@_database_url
def migrate_current(database_url: str | None) -> None:
    """Show the schema's revision."""
    _show_current(database_url)


@migrate.command("check")
@_database_url
def migrate_check(database_url: str | None) -> None:
    """Compare the schema with what this release needs; exit with 1 if they differ."""
    drift = _on_migrations(database_url, lambda migrations: migrations.check())
    for line in drift:
        click.echo(line)
    if drift:
        sys.exit(EXIT_DRIFT)
    click.echo("The schema is what this release needs.")


def _show_current(database_url: str | None) -> None:
    revision = _on_migrations(database_url, lambda migrations: migrations.current())
    click.echo("no schema" if revision is None else revision)


def _on_migrations(database_url: str | None, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    def run() -> T:
        import asyncio

        from lightning_sql.store.factory import migrations_of

        return asyncio.run(work(migrations_of(_settings(database_url=database_url).database_url)))

    return _reporting_errors(run)


def _settings(**flags: Any) -> Settings:
    from lightning_api.settings import Settings

    return Settings.load(os.environ, **{name: value for name, value in flags.items() if value != ()})


def _reporting_errors(run: Callable[[], T]) -> T:
    try:
        return run()
    except LightningError as error:
        click.echo(f"lightning-sql: {error}", err=True)
        sys.exit(EXIT_CONFIGURATION)
    except KeyboardInterrupt:
        sys.exit(0)
    except Exception as error:  # noqa: BLE001 - the interpreter would show more of it than may be shown
        from lightning_api.logs import described

        click.echo(f"lightning-sql failed:\n{described(error)}", err=True)
        sys.exit(EXIT_FAILURE)


def main() -> None:
    """Run the command."""
    cli.main(prog_name="lightning-sql")

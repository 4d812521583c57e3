"""Where a password, a token or a stored value must not turn up: logs, errors, representations, command lines."""

import asyncio
import json
import logging
import sys
import traceback
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from asyncpg.exceptions import NotNullViolationError
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.exc import IntegrityError

from lightning_api.client import LightningClient
from lightning_api.demo import DemoOptions
from lightning_api.logs import SafeFormatter, configure_logging, described, log_lost_error
from lightning_api.settings import Settings
from lightning_sql.database.engine import Database
from lightning_sql.errors import ConfigurationError, DatabaseUnavailableError
from lightning_sql.store.factory import open_store
from tests.api.conftest import Server

SECRET = "sk-very-secret"
PASSWORD = "hunter2"
TOKEN = "swordfish-4711"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def driver_error() -> BaseException:
    message = {"C": "23502", "M": f"null value, {SECRET}", "D": f"Failing row contains ({SECRET})", "t": "resources"}
    inner = raised(NotNullViolationError.new(message))
    return raised(IntegrityError("INSERT INTO resources VALUES ($1)", {"payload": SECRET}, inner), inner)


def test_errors_of_drivers_are_logged_without_their_text() -> None:
    error = raised(DatabaseUnavailableError(), driver_error())
    assert SECRET in "".join(traceback.format_exception(error))
    text = described(error)
    assert SECRET not in text
    assert text.count("Traceback (most recent call last):\n") == 3
    assert "asyncpg.exceptions.NotNullViolationError: sqlstate=23502 table_name=resources" in text
    assert "sqlalchemy.exc.IntegrityError:" in text
    assert "This was the direct cause of" in text
    assert "in raised\n    raise error from cause" in text
    assert text.endswith("lightning_sql.errors.DatabaseUnavailableError: " + str(DatabaseUnavailableError()))


def test_errors_of_other_libraries_are_too() -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_python(SECRET)
    assert SECRET in str(caught.value)
    hidden = raised(RuntimeError("the reason"), None)
    hidden.__context__ = caught.value
    assert described(hidden).endswith("RuntimeError: the reason")
    assert "ValidationError" not in described(hidden)
    hidden.__suppress_context__ = False
    assert "ValidationError: (" in described(hidden)
    assert SECRET not in described(hidden)
    grouped = described(raised(BaseExceptionGroup("two", [RuntimeError("one"), driver_error()])))
    assert "RuntimeError: one" in grouped
    assert "IntegrityError" in grouped
    assert SECRET not in grouped


def test_a_circle_of_causes_ends() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert described(first).count("first") == 1


def test_what_debugging_shows_is_bounded() -> None:
    """SQLAlchemy logs every row that it reads, aiosqlite every value that it is given."""
    names = (None, "uvicorn", "asyncio", "alembic", "lightning_api", "lightning_sql")
    before = [(logger, logger.level, list(logger.handlers)) for logger in map(logging.getLogger, names)]
    try:
        configure_logging(logging.DEBUG)
        assert logging.getLogger("lightning_api.x").isEnabledFor(logging.DEBUG)
        assert logging.getLogger("uvicorn.access").isEnabledFor(logging.INFO)
        for library in ("sqlalchemy.engine.Engine", "sqlalchemy.pool", "aiosqlite", "asyncpg", "litestar", "any"):
            assert not logging.getLogger(library).isEnabledFor(logging.INFO)
            assert logging.getLogger(library).isEnabledFor(logging.WARNING)
        assert [type(handler.formatter) for handler in logging.getLogger().handlers] == [SafeFormatter]
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers


async def test_errors_that_nobody_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise driver_error()

    loop = asyncio.get_running_loop()
    lost = asyncio.ensure_future(fail())
    await asyncio.wait([lost])
    error = lost.exception()
    context = {"message": "Task exception was never retrieved", "exception": error, "future": lost}
    assert SECRET in repr(lost)
    log_lost_error(loop, context)
    log_lost_error(loop, {"message": "no exception at all"})
    first, second = caplog.records
    assert SECRET not in SafeFormatter().format(first)
    assert "IntegrityError" in SafeFormatter().format(first)
    assert SafeFormatter().format(second) == "no exception at all"


async def test_representations(sqlite_url: str) -> None:
    url = f"postgresql://user:{PASSWORD}@db/name"
    client = LightningClient("http://service", token=TOKEN)
    shown = [
        repr(Settings(database_url=url, token=TOKEN)),
        str(Settings(database_url=url, token=TOKEN)),
        repr(Database(url)),
        repr(DemoOptions(token=TOKEN)),
        repr(client),
    ]
    assert "db/name" in shown[2]
    for text in shown:
        assert PASSWORD not in text
        assert TOKEN not in text
    await client.close()
    async with await open_store(sqlite_url) as store:
        assert repr(store)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@127.0.0.1:1",
        "http://user:hun%74er2@127.0.0.1:1",
        "http://127.0.0.1:1/?password=hunter2",
    ],
)
async def test_the_client_shows_its_address_without_secrets(url: str) -> None:
    async with LightningClient(url, retry_seconds=0) as client:
        with pytest.raises(DatabaseUnavailableError) as caught:
            await client.add_resources({})
    assert "127.0.0.1:1" in str(caught.value)
    assert "hun" not in str(caught.value)


def test_a_client_authenticates_in_one_way() -> None:
    with pytest.raises(ConfigurationError):
        LightningClient(f"http://user:{PASSWORD}@127.0.0.1:1", token=TOKEN)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://user@db/name?password={PASSWORD}",
        f"postgresql://user@db/name?{PASSWORD}=1",
        f"postgresql://user@db/name?connect_timeout={PASSWORD}",
        f"postgresql://user:{PASSWORD}@db:port/name",
        f"postgresql://user:{PASSWORD}@db:99999/name",
        f"postgresql://user:{PASSWORD}@[::1/name",
        f"mysql://user:{PASSWORD}@db/name",
        f"sqlite:///file?{PASSWORD}={PASSWORD}",
        f"sqlite://user:{PASSWORD}@/file",
        f"user:{PASSWORD}@db",
        PASSWORD,
    ],
)
def test_a_wrong_url_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Database(url)
    assert PASSWORD not in str(caught.value)
    assert "\n" not in str(caught.value)


URL = f"postgresql://user:{PASSWORD}@127.0.0.1:1/name"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (("serve", URL), {}),
        (("serve", "--token", TOKEN, PASSWORD), {}),
        (("serve", f"--databaseurl={URL}"), {}),
        (("serve", "--port", PASSWORD), {}),
        (("serve", f"--port={PASSWORD}"), {}),
        (("serve",), {"LIGHTNING_SQL_PORT": PASSWORD}),
        (("serve",), {"LIGHTNING_SQL_BODY_LIMIT": PASSWORD}),
        (("serve",), {"LIGHTNING_SQL_SCAN_DEBOUNCE_SECONDS": PASSWORD}),
        (("serve",), {"LIGHTNING_SQL_ALLOW_PUBLIC": PASSWORD}),
        (("serve", "--token", f"{PASSWORD} {PASSWORD}"), {}),
        (("migrate", URL), {}),
        (("migrate", "up", URL), {}),
        (("migrate", "down", "--database-url", "sqlite:///x.db", PASSWORD), {}),
        (("migrate", "current", "--database-url", URL), {}),
        ((URL,), {}),
        (("demo", "--url", f"http://user:{PASSWORD}@127.0.0.1:1", "--token", TOKEN), {}),
        (("demo", "--url", f"http://user:{PASSWORD}@127.0.0.1:1"), {}),
        (("demo", "--rollouts", PASSWORD), {}),
    ],
)
def test_a_mistake_on_the_command_line_is_not_repeated(
    command: Any, arguments: tuple[str, ...], variables: dict[str, str]
) -> None:
    done = command(*arguments, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip()
    assert PASSWORD not in done.stderr
    assert TOKEN not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_mistyped_command_is(command: Any) -> None:
    assert "'serv'" in command("serv").stderr


def test_a_start_that_fails_in_no_way_that_was_foreseen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning_api import cli, serve

    def fail(_settings: Settings) -> None:
        raise driver_error()

    monkeypatch.setattr(serve, "run", fail)
    monkeypatch.setattr(sys, "argv", ["lightning-sql", "serve", "--database-url", URL, "--token", TOKEN])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    shown = capsys.readouterr()
    assert not shown.out
    assert "IntegrityError" in shown.err
    for secret in (SECRET, PASSWORD, TOKEN):
        assert secret not in shown.err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_servers_keep_secrets_to_themselves(kind: str, sqlite_url: str, postgres_url: str, start_server: Any) -> None:
    """Everything is logged, several processes serve, calls fail, a process dies: none of it shows a secret."""
    parts = urlsplit(postgres_url)
    database = sqlite_url
    if kind == "postgresql":
        database = parts._replace(netloc=f"{parts.username}:{PASSWORD}@{parts.netloc.rpartition('@')[2]}").geturl()
    variables = {"LIGHTNING_SQL_DATABASE_URL": database, "LIGHTNING_SQL_TOKEN": TOKEN}
    server: Server = start_server("--log-level", "debug", "--workers", "2", **variables).ready()
    known = {"Authorization": f"Bearer {TOKEN}"}
    resources = {"main": {"resource_type": "llm", "endpoint": "e", "model": "m", "api_key": SECRET}}
    assert server.call("POST", "/v1/agl/resources", resources, **known)[0] == 201
    assert server.call("GET", "/v1/agl/resources/latest", **known)[1]["resources"] == {
        "main": resources["main"] | {"sampling_parameters": {}}
    }
    bad = {"main": resources["main"] | {"model": 1}}
    for path, content in (("/v1/agl/resources", bad), ("/v1/agl/rollouts", {"input": {"api_key": SECRET}, "mode": 1})):
        status, answer = server.call("POST", path, content, **known)
        assert (status, SECRET in json.dumps(answer)) == (422, False)
    assert server.call("POST", "/v1/agl/resources", resources, Authorization=f"Bearer {TOKEN}x")[0] == 401
    process = psutil.Process(server.process.pid)
    family = process.children(recursive=True)
    assert len(family) >= 2
    for member in [process, *family]:
        command_line = " ".join(member.cmdline())
        for secret in (TOKEN, PASSWORD, SECRET):
            assert secret not in command_line
    workers = [member for member in family if "spawn_main" in " ".join(member.cmdline())]
    workers[0].kill()
    assert server.call("GET", "/v1/agl/health")[0] == 200
    server.process.terminate()
    assert server.wait() == 0
    log = "\n".join(server.lines)
    assert " DEBUG " in log or " INFO uvicorn" in log
    for secret in (TOKEN, PASSWORD, SECRET):
        assert secret not in log

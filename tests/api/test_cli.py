"""The `lightning-sql` command: help that fits a screen, and one line when it cannot work."""

import socket
import sqlite3
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("serve",),
        ("prometheus",),
        ("migrate",),
        ("migrate", "up"),
        ("migrate", "down"),
        ("migrate", "current"),
        ("migrate", "check"),
    ],
)
def test_help_fits_a_screen(command: Any, arguments: tuple[str, ...]) -> None:
    done = command(*arguments, "--help")
    assert done.returncode == 0
    lines = done.stdout.rstrip().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert not done.stderr


def test_help_names_every_flag(command: Any) -> None:
    text = command("serve", "--help").stdout
    for flag in ("--database-url", "--host", "--port", "--workers", "--partition", "--scan-debounce-seconds"):
        assert flag in text
    for flag in (
        "--cors-origin",
        "--token",
        "--log-level",
        "--tracker",
        "--body-limit",
        "--allow-public",
        "LIGHTNING_SQL_",
    ):
        assert flag in text


def test_version(command: Any) -> None:
    from lightning_sql import __version__

    assert command("--version").stdout.strip() == f"lightning-sql {__version__}"


SECRET = "hunter2"
UNREACHABLE = f"postgresql://user:{SECRET}@127.0.0.1:1/nothing"


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (("--database-url", "mysql://u:hunter2@h/d"), {}),
        (("--database-url", "nonsense"), {}),
        (("--database-url", ""), {}),
        (("--database-url", UNREACHABLE), {}),
        ((), {"LIGHTNING_SQL_DATABASE_URL": UNREACHABLE}),
        (("--database-url", "sqlite:////nowhere/at/all/lightning.db"), {}),
        (("--database-url", "memory://", "--workers", "2"), {}),
        (("--database-url", "memory://", "--host", "0.0.0.0"), {}),
        (("--database-url", "memory://", "--host", "192.0.2.1", "--allow-public"), {}),
        (("--database-url", "memory://", "--host", "no.such.host.invalid", "--allow-public"), {}),
        (("--database-url", "memory://"), {"LIGHTNING_SQL_PORT": "many"}),
        (("--database-url", "memory://", "--workers", "0"), {}),
        (("--database-url", "memory://", "--token", ""), {}),
        (("--database-url", "memory://"), {"LIGHTNING_SQL_TOKEN": ""}),
        (("--database-url", "memory://", "--log-level", "loud"), {}),
        (("--database-url", "memory://", "--scan-debounce-seconds", "-1"), {}),
        (("--database-url", "memory://", "--tracker", "abacus"), {}),
        (("--database-url", "sqlite:///x.db", "--tracker", "console", "--workers", "2"), {}),
    ],
)
def test_one_clear_line_and_exit_2(command: Any, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    port = () if variables.get("LIGHTNING_SQL_PORT") else ("--port", "0")
    done = command("serve", *port, *arguments, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("lightning-sql: ")
    assert len(line) > len("lightning-sql: ")
    assert SECRET not in line


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        ((), {}),
        (("--metrics-path", "/health"), {"PROMETHEUS_MULTIPROC_DIR": "/"}),
        ((), {"PROMETHEUS_MULTIPROC_DIR": "/", "LIGHTNING_SQL_TOKEN": ""}),
    ],
)
def test_the_exporter_says_in_one_line_what_is_wrong(
    command: Any, arguments: tuple[str, ...], variables: dict[str, str]
) -> None:
    done = command("prometheus", "--port", "0", *arguments, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("lightning-sql: ")


def test_a_metrics_directory_that_cannot_be_used(command: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    several = ("--workers", "2", "--database-url", f"sqlite:///{tmp_path}/lightning.db", "--port", "0")
    path = tmp_path / "file" / "below"
    done = command("serve", *several, "--tracker", "prometheus", PROMETHEUS_MULTIPROC_DIR=str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"lightning-sql: {path} (PROMETHEUS_MULTIPROC_DIR) cannot be written: Not a directory\n"


def test_a_port_in_use(command: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = command("serve", "--database-url", "memory://", "--port", str(port))
    assert done.returncode == 2
    assert done.stderr == f"lightning-sql: port {port} of 127.0.0.1 is in use\n"


def test_migrate_sqlite(command: Any, sqlite_url: str) -> None:
    url = ("--database-url", sqlite_url)
    assert command("migrate", "current", *url).stdout == "no schema\n"
    up = command("migrate", "up", *url)
    assert (up.returncode, up.stderr) == (0, "")
    revision = up.stdout.strip()
    assert command("migrate", "current", *url).stdout.strip() == revision
    check = command("migrate", "check", *url)
    assert (check.returncode, check.stdout, check.stderr) == (0, "The schema is what this release needs.\n", "")
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as connection:
        connection.execute("CREATE TABLE stranger (id INTEGER PRIMARY KEY)")
    connection.close()
    drifted = command("migrate", "check", LIGHTNING_SQL_DATABASE_URL=sqlite_url)
    assert drifted.returncode == 1
    assert "stranger" in drifted.stdout
    down = command("migrate", "down", "base", *url)
    assert (down.returncode, down.stdout) == (0, "no schema\n")


def test_migrate_postgres(command: Any, postgres_url: str) -> None:
    url = ("--database-url", postgres_url)
    assert command("migrate", "up", *url).returncode == 0
    check = command("migrate", "check", *url)
    assert (check.returncode, check.stdout, check.stderr) == (0, "The schema is what this release needs.\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("verb", [("up",), ("down", "base"), ("current",), ("check",)])
def test_migrate_errors(command: Any, verb: tuple[str, ...]) -> None:
    for url in ("memory://", UNREACHABLE, "nonsense"):
        done = command("migrate", *verb, "--database-url", url)
        assert (done.returncode, done.stdout) == (2, "")
        [line] = done.stderr.strip().splitlines()
        assert SECRET not in line


def test_a_schema_of_another_release(command: Any, postgres: Any, postgres_url: str) -> None:
    assert command("migrate", "up", "--database-url", postgres_url).returncode == 0
    postgres.execute("UPDATE alembic_version SET version_num = 'unheard-of'", database=postgres_url)
    done = command("serve", "--port", "0", "--database-url", postgres_url)
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("lightning-sql: ")
    assert "unheard-of" in line

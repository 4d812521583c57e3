"""Every command and every snippet of the README and the docs is run as it stands."""

import contextlib
import http.client
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from lightning_api.settings import Settings
from lightning_sql.testing.postgres import PostgresServer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:4747"

# These make an environment of their own, or run this very suite: only what they would do is looked at.
MAKE_DRY = ("make serve", "make test", "make demo")


def blocks(language: str) -> list[tuple[Path, str]]:
    found = [(page, *block) for page in PAGES for block in BLOCK.findall(page.read_text())]
    return [(page, text) for page, kind, text in found if kind == language]


COMMANDS = [
    pytest.param(page, line, id=f"{page.name}-{line[:60]}")
    for page, text in blocks("console")
    for line in text.splitlines()
]
SNIPPETS = [pytest.param(page, text, id=f"{page.name}-{index}") for index, (page, text) in enumerate(blocks("python"))]


def environment(folder: Path) -> dict[str, str]:
    """Where `lightning-sql` is this checkout's, and nothing is set."""
    binaries = folder / "bin"
    binaries.mkdir()
    script = binaries / "lightning-sql"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lightning_api "$@"\n')
    script.chmod(0o755)
    return {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'api'}",
        "HOME": str(folder),
    }


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path)


def answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def server(arguments: list[str], port: int, place: Path, variables: dict[str, str]) -> Iterator[None]:
    """A server that was started by a command; it must stop cleanly."""
    process = subprocess.Popen([*arguments, "--port", str(port)], cwd=place, env=variables)
    try:
        deadline = time.monotonic() + 60
        while not answers(port, "/readyz"):
            assert process.poll() is None, "the server ended by itself"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0


def run(arguments: list[str], place: Path, variables: dict[str, str]) -> str:
    done = subprocess.run(arguments, cwd=place, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command(
    page: Path,
    line: str,
    place: Path,
    variables: dict[str, str],
    postgres: PostgresServer,
    unused_tcp_port: int,
) -> None:
    """A command that this test does not know how to run fails it."""
    if line in MAKE_DRY:
        for file in (ROOT / "Makefile", ROOT / "pyproject.toml", *ROOT.glob("requirements*")):
            shutil.copy(file, place)
        assert run(["make", "--dry-run", *line.split()[1:]], place, variables | {"PATH": os.environ["PATH"]})
        return
    # The documented port and database belong to whoever reads the docs.
    line = line.replace(ADDRESS, f"http://127.0.0.1:{unused_tcp_port}")
    arguments = shlex.split(line.replace("postgresql://user@localhost/training", postgres.create_database()))
    match arguments[:2]:
        case ["lightning-sql", "serve"]:
            with server(arguments, unused_tcp_port, place, variables):
                pass
        case ["lightning-sql", "migrate"]:
            run(["lightning-sql", "migrate", "up"], place, variables)
            assert run(arguments, place, variables)
        case ["lightning-sql", "demo"] if "--url" in arguments:
            with server(
                ["lightning-sql", "serve", "--scan-debounce-seconds", "0.2"], unused_tcp_port, place, variables
            ):
                assert "NO" not in run(arguments, place, variables)
        case ["lightning-sql", "demo"]:
            assert "NO" not in run(arguments, place, variables)
        case ["curl", "-s"]:
            with server(["lightning-sql", "serve"], unused_tcp_port, place, variables):
                ask(arguments, unused_tcp_port)
        case _:
            pytest.fail(f"{page.name} has a command that nothing runs: {line}")


def ask(arguments: list[str], port: int) -> None:
    """Do what a curl command does: machines without curl must pass, too."""
    headers, body, path = {}, None, ""
    words = iter(arguments[2:])
    for word in words:
        if word == "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        elif word == "-d":
            body = next(words)
        else:
            path = word.removeprefix(f"http://127.0.0.1:{port}")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET" if body is None else "POST", path, body, headers)
    assert connection.getresponse().status in (200, 201)
    connection.close()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "snippet"), SNIPPETS)
def test_a_snippet(page: Path, snippet: str, place: Path, variables: dict[str, str]) -> None:
    if "agentlightning" in snippet:
        # Importing upstream's package as a whole needs all of its dependencies: its import is made the light way.
        bare = "import sys, types, importlib.util as u; m = types.ModuleType('agentlightning'); "
        bare += "m.__path__ = list(u.find_spec('agentlightning').submodule_search_locations); "
        snippet = f"{bare}sys.modules['agentlightning'] = m\n{snippet}"
    assert page.exists()
    run([sys.executable, "-c", snippet], place, variables)


def test_there_is_something_to_run() -> None:
    assert len(COMMANDS) > 15
    assert len(SNIPPETS) >= 2


def test_every_link_to_a_file_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_lists_every_setting() -> None:
    rows = re.findall(
        r"^\| `(--[\w-]+)` \| `(LIGHTNING_SQL_\w+)` \| (.+?) \|", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    settings = {f"LIGHTNING_SQL_{setting.name.upper()}": setting.default for setting in fields(Settings)}
    assert [variable for _, variable, _ in rows] == list(settings)
    for option, variable, default in rows:
        assert variable.startswith("LIGHTNING_SQL_" + option[2:].replace("-", "_").upper())
        value = settings[variable]
        if isinstance(value, str | int) and not isinstance(value, bool):
            assert default == f"`{value}`"


def test_the_readme_lists_every_option_of_serve() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "lightning_api", "serve", "--help"],
        env={"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'api'}", "PATH": os.environ["PATH"], "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    documented = set(re.findall(r"^\| `(--[\w-]+)`", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", help_text)) - {"--help"} == documented
    assert len(help_text.splitlines()) <= 24
    assert max(map(len, help_text.splitlines())) <= 80

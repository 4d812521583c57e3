"""Every command and every snippet of the README and the docs is run as it stands."""

import json
import re
import shlex
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lightning_api.settings import Settings
from lightning_sql.testing.postgres import PostgresServer
from tests.bench.fake_prometheus import fake_prometheus
from tests.commands import ROOT, call, environment, run, serving
from tests.docs.docker import read_docker_command
from tools.deployment.command_line import CommandError

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:4747"
DATABASE = "postgresql://user@localhost/training"

# These run this very suite, and would run this test again, or take long, or ask other machines: only what they would
# do is looked at.
DRY = (
    "make test",
    "make test-fast",
    "make lint",
    "make soak MINUTES=10",
    "make audit",
    "make restart",
    "make properties",
    "make bench-quick",
    "make test-monitoring",
)

COMMANDS_IN = ("console", "sh", "bash", "shell")
TEXT_IN = ("", "text")


def blocks(*languages: str) -> list[tuple[Path, str]]:
    found = [(page, *block) for page in PAGES for block in BLOCK.findall(page.read_text())]
    return [(page, text) for page, language, text in found if language in languages]


LINES = [(page, line) for page, text in blocks(*COMMANDS_IN) for line in text.splitlines()]
COMMANDS = [
    pytest.param(page, line, id=f"{page.name}-{line[:60]}") for page, line in LINES if "docker" not in shlex.split(line)
]
NEEDING_DOCKER = [line for _, line in LINES if "docker" in shlex.split(line)]
SNIPPETS = [pytest.param(page, text, id=f"{page.name}-{index}") for index, (page, text) in enumerate(blocks("python"))]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path)


def checkout(place: Path, variables: dict[str, str]) -> None:
    """What `make` needs of a checkout, with an environment that it takes for installed: this one."""
    for file in (ROOT / "Makefile", ROOT / "pyproject.toml", *ROOT.glob("requirements*")):
        shutil.copy(file, place)
    installed = place / ".venv"
    binaries = installed / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(sys.executable)
    (binaries / "activate").write_text(str(installed))
    shutil.copy(shutil.which("lightning-sql", path=variables["PATH"]) or "", binaries)
    for stamp in (".runtime-lock", ".runtime"):
        (installed / stamp).touch()


def succeed(arguments: list[str], place: Path, variables: dict[str, str]) -> str:
    done = run(arguments, place, variables)
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
    port = unused_tcp_port
    # The documented port and database belong to whoever reads the docs.
    database = postgres.create_database() if DATABASE in line else ""
    arguments = shlex.split(line.replace(ADDRESS, f"http://127.0.0.1:{port}").replace(DATABASE, database))
    server = ["lightning-sql", "serve", "--scan-debounce-seconds", "0.2", "--port", str(port)]
    while re.fullmatch(r"[A-Z_]+=.*", arguments[0]):
        name, _, value = arguments.pop(0).partition("=")
        variables[name] = value
    match arguments:
        case ["python3", "-c", program]:
            assert succeed([sys.executable, "-c", program], place, variables).strip()
        case ["make", *_]:
            checkout(place, variables)
            make(line, arguments, port, place, variables)
        case ["lightning-sql", "serve", *_]:
            with serving([*arguments, "--port", str(port)], port, place, variables):
                assert json.loads(call(port, "/v1/agl/health")[1]) == {"status": "ok"}
        case ["lightning-sql", "prometheus", *_]:
            (place / variables["PROMETHEUS_MULTIPROC_DIR"]).mkdir()
            with serving([*arguments, "--port", str(port)], port, place, variables, "/health"):
                assert call(port, "/v1/prometheus") == (200, "")
        case ["lightning-sql", "migrate", *_]:
            succeed(["lightning-sql", "migrate", "up"], place, variables)
            assert succeed(arguments, place, variables)
        case ["lightning-sql", "demo", "--url", *_]:
            with serving(server, port, place, variables):
                shows_a_sound_run(succeed(arguments, place, variables))
        case ["lightning-sql", "demo", *_]:
            shows_a_sound_run(succeed(arguments, place, variables))
        case ["python", "-m", module, option, _] if module.startswith("tests.faults."):
            # These take long, and are played in a short form elsewhere: only that there are such is looked at.
            assert option in succeed([sys.executable, "-m", module, "--help"], place, variables)
        case ["python", "-m", module, *words] if module.startswith("bench."):
            benchmark(module, words, [*server, "--tracker", "prometheus"], port, place, variables)
        case ["curl", "-s", *words]:
            with serving([*server, "--tracker", "prometheus"], port, place, variables):
                answers(words, port)
        case _:
            pytest.fail(f"{page.name} has a command that nothing runs: {line}")


def answers(words: list[str], port: int) -> None:
    status, body = ask(words, port)
    assert status in (200, 201), body
    if "\nlightning_sql_build_info{" not in body:
        json.loads(body)


def benchmark(
    module: str, words: list[str], server: list[str], port: int, place: Path, variables: dict[str, str]
) -> None:
    """Run one of the bench families with few tasks."""
    command = [sys.executable, "-m", module]
    match module:
        case "bench.collections":
            # PostgreSQL runs as somebody else, for whom the test's own folder for temporary files is closed.
            variables = {name: value for name, value in variables.items() if name != "TMPDIR"}
            assert f"{words[0]}: concurrency" in succeed([*command, *words, "--total-tasks", "60"], place, variables)
        case "bench.micro":
            few = ["--total-tasks", "20", "--concurrency", "4"]
            with serving(server, port, place, variables):
                assert f"{words[0]}: concurrency" in succeed([*command, *words, *few], place, variables)
        case "bench.store":
            few = ["--total-tasks", "8", "--sleep-seconds", "0.01", "--poll-seconds", "0.1"]
            with serving(server, port, place, variables):
                assert "stale 0, wrong spans 0, failed calls 0" in succeed([*command, *words, *few], place, variables)
        case "bench.waits":
            words = [word.replace("http://127.0.0.1:4748", f"http://127.0.0.1:{port}") for word in words]
            few = ["--total-tasks", "5", "--waiters", "3"]
            with serving(server, port, place, variables):
                assert "the same server" in succeed([*command, *words, *few], place, variables)
        case "bench.clients":
            # It needs the upstream client's own environment.
            assert "by both clients" in succeed([*command, "--help"], place, variables)
        case "bench.compare":
            # It takes long, and is played in a short form elsewhere: only that there is such an option is looked at.
            assert words[0] in succeed([*command, "--help"], place, variables)
        case "bench.analyze":
            with fake_prometheus() as address:
                words = [word.replace("http://127.0.0.1:9090", address) for word in words]
                assert "store methods" in succeed([*command, *words], place, variables)
        case _:
            pytest.fail(f"a benchmark that nothing runs: {module}")


@pytest.mark.parametrize("line", NEEDING_DOCKER)
def test_a_command_that_needs_a_docker_engine(line: str) -> None:
    """It is only looked at: what it names must be there."""
    read_docker_command(line)


@pytest.mark.parametrize(
    "line",
    [
        "docker build -f Dockerfile .",
        "docker run -p 127.0.0.1:80:80 lightning-sql",
        "docker run lightning-sql server",
        "docker compose -f docker/compose.sqlite.yaml logs postgres",
        "docker compose -f docker/compose.sqlite.yaml up --detached",
        "docker compose -f docker/compose.postgres.yaml cp prometheus:/data saved",
        "docker compose -f docker/compose.postgres.yaml run --rm server migrate sideways",
        "POSTGRES_PASSWORD=x docker compose -f docker/compose.sqlite.yaml down",
        "docker swarm init",
    ],
)
def test_a_docker_command_that_could_not_work_is_found(line: str) -> None:
    with pytest.raises((AssertionError, KeyError, CommandError)):
        read_docker_command(line)


def make(line: str, arguments: list[str], port: int, place: Path, variables: dict[str, str]) -> None:
    match arguments:
        case _ if line in DRY:
            assert succeed(["make", "--dry-run", *arguments[1:]], place, variables)
        case ["make", "serve"]:
            with serving([*arguments, f"ARGS=--port {port}"], port, place, variables):
                assert json.loads(call(port, "/v1/agl/health")[1]) == {"status": "ok"}
            assert (place / "lightning.db").exists()
        case ["make", "demo"]:
            shows_a_sound_run(succeed(arguments, place, variables))
        case ["make", "demo", aimed] if aimed.startswith("ARGS=--url"):
            server = ["lightning-sql", "serve", "--scan-debounce-seconds", "0.2", "--port", str(port)]
            with serving(server, port, place, variables):
                shows_a_sound_run(succeed(arguments, place, variables))
        case _:
            pytest.fail(f"a make command that nothing runs: {line}")


def shows_a_sound_run(shown: str) -> None:
    assert "What happened" in shown
    assert shown.count("yes") == 5
    assert "NO" not in shown


def ask(words: list[str], port: int) -> tuple[int, str]:
    """Do what a curl command does: machines without curl must pass, too."""
    headers: dict[str, str] = {}
    body, path = None, ""
    rest = iter(words)
    for word in rest:
        match word:
            case "-H":
                name, _, value = next(rest).partition(": ")
                headers[name] = value
            case "-d":
                body = next(rest)
            case _:
                path = word.removeprefix(f"http://127.0.0.1:{port}")
                assert path.startswith("/"), f"curl has an option that this test does not know: {word}"
    return call(port, path, body, headers)


@pytest.mark.slow
def test_the_quick_start_in_its_order(place: Path, variables: dict[str, str], unused_tcp_port: int) -> None:
    """What is put into the queue comes out of it, and the demo finds it empty."""
    port = unused_tcp_port
    lines = [line for page, text in blocks(*COMMANDS_IN) if page.name == "quickstart.md" for line in text.splitlines()]
    answers: dict[str, Any] = {}
    with serving(["lightning-sql", "serve", "--port", str(port)], port, place, variables):
        for line in lines:
            if line.startswith("curl"):
                words = shlex.split(line.replace(ADDRESS, f"http://127.0.0.1:{port}"))[2:]
                answers[line.split()[2].removeprefix(ADDRESS)] = json.loads(ask(words, port)[1])
        waiting = json.loads(call(port, "/v1/agl/rollouts?status_in=queuing&status_in=requeuing")[1])
    assert answers["/v1/agl/health"] == {"status": "ok"}
    [enqueued], [claimed] = answers["/v1/agl/queues/rollouts/enqueue"], answers["/v1/agl/queues/rollouts/dequeue"]
    assert claimed["rollout_id"] == enqueued["rollout_id"]
    assert claimed["attempt"]["worker_id"] == "runner-1"
    assert answers["/v1/agl/statistics"]["total_rollouts"] == 1
    assert waiting["total"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("page", "snippet"), SNIPPETS)
def test_a_snippet(page: Path, snippet: str, place: Path, variables: dict[str, str]) -> None:
    if "agentlightning" in snippet:
        # Importing upstream's package as a whole needs all of its dependencies: its import is made the light way.
        bare = "import sys, types, importlib.util as u; m = types.ModuleType('agentlightning'); "
        bare += "m.__path__ = list(u.find_spec('agentlightning').submodule_search_locations); "
        snippet = f"{bare}sys.modules['agentlightning'] = m\n{snippet}"
    succeed([sys.executable, "-c", snippet], place, variables)


@pytest.mark.slow
def test_the_rights_that_a_server_needs(
    place: Path, variables: dict[str, str], postgres: PostgresServer, unused_tcp_port: int
) -> None:
    """A role with no more than the documented rights serves, and cannot change the schema."""
    port = unused_tcp_port
    [(_, script)] = blocks("sql")
    database = postgres.create_database()
    succeed(["lightning-sql", "migrate", "up", "--database-url", database], place, variables)
    account = "lightning_server:choose-one"
    theirs = urlsplit(database)._replace(netloc=f"{account}@{urlsplit(database).netloc.rpartition('@')[2]}").geturl()
    try:
        for statement in filter(str.strip, script.split(";")):
            postgres.execute(statement, database=database)
        command = ["lightning-sql", "serve", "--port", str(port), "--database-url", theirs]
        with serving(command, port, place, variables):
            for path, body in (
                ("/v1/agl/resources", {"main": {"resource_type": "llm", "endpoint": "e", "model": "m"}}),
                ("/v1/agl/queues/rollouts/enqueue", {"rollouts": [{"input": 1}]}),
                ("/v1/agl/queues/rollouts/dequeue", {"limit": 1, "worker_id": "w"}),
                ("/v1/agl/workers/w", {"heartbeat_stats": {}}),
                ("/v1/agl/spans/next", {"rollout_id": "r", "attempt_id": "a"}),
            ):
                status, answer = call(port, path, json.dumps(body), {"content-type": "application/json"})
                assert status in (200, 201), answer
            [rollout] = json.loads(call(port, "/v1/agl/rollouts?limit=5")[1])["items"]
            attempt = f"/v1/agl/rollouts/{rollout['rollout_id']}/attempts/latest"
            status, answer = call(port, attempt, '{"status": "succeeded"}', {"content-type": "application/json"})
            assert (status, json.loads(answer)["status"]) == (200, "succeeded")
        refused = run(["lightning-sql", "migrate", "down", "base", "--database-url", theirs], place, variables)
        assert refused.returncode == 2
        assert "permissions" in refused.stderr
        assert "choose-one" not in refused.stderr
    finally:
        postgres.execute("DROP OWNED BY lightning_server", database=database)
        postgres.execute("DROP ROLE lightning_server", database=database)
        postgres.drop_database(database)


def test_every_block_is_run_or_plain_text() -> None:
    for page in PAGES:
        text = page.read_text()
        languages = {language for language, _ in BLOCK.findall(text)}
        assert languages <= {*COMMANDS_IN, *TEXT_IN, "python", "sql"}, page.name
        # None is indented, left open or fenced in another way, which would hide it from this test.
        assert 2 * len(BLOCK.findall(text)) == text.count("```"), page.name
        assert "~~~" not in text, page.name


def test_there_is_something_to_run() -> None:
    assert len(COMMANDS) > 15
    assert len(NEEDING_DOCKER) > 5
    assert len(SNIPPETS) >= 2


def test_every_link_to_a_file_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def shown(value: object) -> str:
    """How the README shows a default."""
    match value:
        case None | ():
            return "none"
        case False:
            return "no"
        case float():
            return f"`{value:g}`"
        case _:
            return f"`{value}`"


def test_the_readme_lists_every_setting_with_its_default() -> None:
    rows = re.findall(
        r"^\| `(--[\w-]+)` \| `(LIGHTNING_SQL_\w+)` \| (.+?) \|", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    settings = [(f"LIGHTNING_SQL_{setting.name.upper()}", shown(setting.default)) for setting in fields(Settings)]
    assert [(variable, default) for _, variable, default in rows] == settings
    for option, variable, _ in rows:
        # A list is one option, repeated, and one variable.
        assert variable.removesuffix("S") == "LIGHTNING_SQL_" + option[2:].replace("-", "_").upper().removesuffix("S")


def test_the_readme_lists_every_option_of_serve(tmp_path: Path, variables: dict[str, str]) -> None:
    help_text = succeed(["lightning-sql", "serve", "--help"], tmp_path, variables)
    documented = set(re.findall(r"^\| `(--[\w-]+)`", (ROOT / "README.md").read_text(), re.MULTILINE))
    # Those that hardly anybody needs would make the help longer than a screen.
    rare = {"--max-requests", "--max-request-bytes"}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", help_text)) - {"--help"} == documented - rare
    assert len(help_text.splitlines()) <= 24
    assert max(map(len, help_text.splitlines())) <= 80

"""The distribution: what the wheel holds, what the locks pin, and that the documents say the same."""

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("requirements.txt", "requirements-build.txt", "requirements-dev.txt", "requirements-upstream.txt")
LOCKS += ("requirements-audit.txt",)
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def normalised(requirement: str) -> str:
    """A requirement's package name, as the package index compares names."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def requirements(group: str) -> Iterator[str]:
    """The requirements of a dependency group with those of the groups that it includes."""
    for entry in PROJECT["dependency-groups"][group]:
        if isinstance(entry, str):
            yield entry
        else:
            yield from requirements(entry["include-group"])


def locked(name: str) -> dict[str, str]:
    """What a lock file pins: package name to version, markers included."""
    pins = re.findall(r"^([a-z0-9-]+)==([^\\\n]+?) *\\?$", (ROOT / name).read_text(), flags=re.MULTILINE)
    return dict(pins)


def documented(*headings: str) -> set[str]:
    """The packages in the tables of docs/dependencies.md, under these headings or under all."""
    sections = re.split(r"^## ", (ROOT / "docs" / "dependencies.md").read_text(), flags=re.MULTILINE)[1:]
    chosen = [text for text in sections if not headings or text.partition("\n")[0] in headings]
    return {name for text in chosen for name in re.findall(r"^\| `([^`]+)` \| \S", text, flags=re.MULTILINE)}


def test_every_dependency_is_justified_and_nothing_else_is() -> None:
    runtime = {normalised(text) for text in PROJECT["project"]["dependencies"]}
    others = {normalised(text) for group in ("dev", "audit") for text in requirements(group)}
    assert documented("Runtime") == runtime
    extras = {normalised(text) for texts in PROJECT["project"]["optional-dependencies"].values() for text in texts}
    assert documented("Extras") == extras
    assert documented() == runtime | extras | others


def test_every_runtime_dependency_has_an_upper_bound() -> None:
    unbounded = [text for text in PROJECT["project"]["dependencies"] if "<" not in text]
    assert unbounded == []


@pytest.mark.parametrize("name", [*LOCKS, "tests/agentlightning/requirements.txt"])
def test_a_lock_pins_everything_by_hash_and_names_no_host(name: str) -> None:
    text = (ROOT / name).read_text()
    assert locked(name)
    for block in re.split(r"\n(?=[a-z0-9])", text.strip()):
        assert re.match(r"[a-z0-9-]+(\[[a-z0-9,]+\])?==\S+", block), block
        assert "--hash=sha256:" in block, block
    assert "://" not in text
    assert not re.search(r"^--|[a-z0-9-]+\.(org|com|net|io)\b", text, flags=re.MULTILINE)


def test_the_locks_hold_what_the_project_asks_for() -> None:
    assert {normalised(text) for text in PROJECT["project"]["dependencies"]} <= locked("requirements.txt").keys()
    assert {normalised(text) for text in requirements("build")} <= locked("requirements-build.txt").keys()
    assert {normalised(text) for text in requirements("dev")} <= locked("requirements-dev.txt").keys()
    assert {normalised(text) for text in requirements("audit")} <= locked("requirements-audit.txt").keys()


def test_everything_that_is_locked_is_audited() -> None:
    """What PyPI says nothing of must fail the audit, too: without `--strict` it would only be mentioned."""
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", "audit"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    [(files, options)] = re.findall(r"for file in (.*?);.*?pip_audit (.*?)done", shown, flags=re.DOTALL)
    contained = {"requirements.txt", "requirements-build.txt"}  # in the development lock, as the next test says
    assert {*files.split(), *contained} == set(LOCKS)
    for option in ("--strict", "--vulnerability-service pypi", "--disable-pip", "--require-hashes"):
        assert option in options


def test_an_audit_that_finds_something_fails(tmp_path: Path) -> None:
    """The first file that has something must not be forgotten over the next one."""
    for name in ("Makefile", *LOCKS):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    audit = tmp_path / ".venv-audit" / "bin" / "python"
    audit.parent.mkdir(parents=True)
    asked = tmp_path / "asked"
    for vulnerable, status in (("requirements-dev.txt", 2), ("requirements-audit.txt", 2), ("none", 0)):
        audit.write_text(f'#!/bin/sh\nfor last; do :; done\necho "$last" >> {asked}\n[ "$last" != {vulnerable} ]\n')
        audit.chmod(0o755)
        (tmp_path / ".venv-audit" / ".installed").touch()
        command = ["make", "-o", "requirements-audit.txt", "-o", ".venv/bin/python", "audit"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    files = ["requirements-dev.txt", "requirements-upstream.txt", "requirements-audit.txt"]
    assert asked.read_text().split() == 3 * files


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-build.txt"])
def test_the_development_lock_contains_the_others(name: str) -> None:
    assert locked(name).items() <= locked("requirements-dev.txt").items()


def test_the_wheel_holds_both_packages_the_migrations_and_the_command(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        commands = ConfigParser()
        commands.read_string(archive.read(entry_points).decode())
    for folder, installed in (
        ("lightning_sql", "lightning_sql"),
        ("api/lightning_api", "lightning_api"),
        ("migrations", "lightning_sql/_migrations"),
    ):
        sources = {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.py")}
        assert {f"{installed}/{name}" for name in sources} <= names
    assert {"lightning_sql/py.typed", "lightning_api/py.typed", "lightning_sql/_migrations/env.py"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"lightning_sql", "lightning_api"}
    assert dict(commands["console_scripts"]) == {"lightning-sql": "lightning_api.cli:main"}


def test_importing_the_library_loads_no_server_and_no_test_code() -> None:
    program = "import sys, lightning_sql; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = set(loaded.stdout.split())
    assert "lightning_sql" in modules
    unwanted = {"litestar", "uvicorn", "aiohttp", "lightning_api", "lightning_sql.testing", "alembic", "pytest"}
    assert modules & unwanted == set()

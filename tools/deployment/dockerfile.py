"""Checks of `docker/Dockerfile` and `.dockerignore`, without a Docker engine."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning_sql.errors import ConfigurationError
from tools.deployment.command_line import CommandError, parse, settings_of
from tools.deployment.findings import Finding, image_problem

__all__ = ["DOCKERFILE", "Dockerfile", "check_dockerfile", "copied_files", "read_dockerfile"]

DOCKERFILE: Final = "docker/Dockerfile"
_IGNORE: Final = ".dockerignore"
_HOST: Final = re.compile(r"\b[a-z0-9-]+\.(com|org|io|net|dev)\b")


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """What is in a Dockerfile.

    Attributes:
        instructions: each with its arguments, in their order.
    """

    instructions: tuple[tuple[str, str], ...]

    def all(self, name: str) -> list[str]:
        """The arguments of every instruction of a name."""
        return [arguments for instruction, arguments in self.instructions if instruction == name]

    def last(self, name: str) -> str:
        """The arguments of the last instruction of a name; empty where there is none in the last stage."""
        found = ""
        for instruction, arguments in self.instructions:
            found = "" if instruction == "FROM" else arguments if instruction == name else found
        return found

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the last stage."""
        found: dict[str, str] = {}
        for instruction, arguments in self.instructions:
            if instruction == "FROM":
                found.clear()
            elif instruction == "ENV":
                found |= dict(word.split("=", 1) for word in shlex.split(arguments))
        return found

    @property
    def entrypoint(self) -> list[str]:
        """What runs, before the arguments."""
        return _exec_form(self.last("ENTRYPOINT"))


def read_dockerfile(root: Path) -> Dockerfile:
    """The Dockerfile of a checkout, its `ARG`s replaced by their defaults."""
    lines = [line for line in (root / DOCKERFILE).read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    instructions: list[tuple[str, str]] = []
    defaults: dict[str, str] = {}
    for line in filter(str.strip, text.splitlines()):
        name, _, arguments = line.strip().partition(" ")
        for variable, value in defaults.items():
            arguments = arguments.replace(f"${{{variable}}}", value)
        if name == "ARG":
            variable, _, value = arguments.partition("=")
            defaults[variable] = value
        instructions.append((name, arguments.strip()))
    return Dockerfile(tuple(instructions))


def check_dockerfile(root: Path) -> Iterator[Finding]:
    """What is wrong with how the image is built and started."""
    file = read_dockerfile(root)
    messages = [
        *_stages(file),
        *_copies(file, root),
        *_installs(file),
        *_start(file),
        *_health(file),
    ]
    for message in messages:
        yield Finding(DOCKERFILE, message)


def copied_files(root: Path) -> dict[str, Path]:
    """What the build gets to see of a checkout: where it stands below the working directory, and the file here."""
    ignored = _ignored_by((root / _IGNORE).read_text())
    files: dict[str, Path] = {}
    for source in _copy_sources(read_dockerfile(root)):
        found = root / source
        for path in sorted(found.rglob("*")) if found.is_dir() else [found]:
            name = path.relative_to(root).as_posix()
            if path.is_file() and not ignored(name):
                files[name] = path
    return files


def _stages(file: Dockerfile) -> Iterator[str]:
    stages: list[str] = []
    for arguments in file.all("FROM"):
        image, _, alias = arguments.partition(" AS ")
        if image not in stages and (problem := image_problem(image)):
            yield problem
        stages.append(alias)
    for arguments in file.all("COPY"):
        for stage in re.findall(r"--from=(\S+)", arguments):
            if stage not in stages:
                yield f"nothing is built as {stage}"
    user = file.last("USER")
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", user):
        yield f"the user must be a number that is not root's, not '{user}'"
    for name, arguments in file.instructions:
        if name == "ADD":
            yield "ADD fetches and unpacks; use COPY"
        if _HOST.search(arguments):
            yield f"{name} names a host: {arguments}"


def _copies(file: Dockerfile, root: Path) -> Iterator[str]:
    ignored = _ignored_by((root / _IGNORE).read_text())
    for source in _copy_sources(file):
        if not (root / source).exists():
            yield f"there is no {source} to copy"
        elif ignored(source):
            yield f"{source} is copied, but {_IGNORE} leaves it out"
    for secret in (".env", "lightning.db", ".git/config", "docker/.env"):
        if not ignored(secret):
            yield f"{_IGNORE} lets {secret} into the build"


def _copy_sources(file: Dockerfile) -> Iterator[str]:
    for arguments in file.all("COPY"):
        if "--from=" not in arguments:
            *sources, _ = shlex.split(arguments)
            yield from sources


def _installs(file: Dockerfile) -> Iterator[str]:
    for arguments in file.all("RUN"):
        words = _exec_form(arguments) or shlex.split(arguments)
        installs = "install" in words and any(word.endswith("pip") for word in words)
        if installs and not {"--require-hashes", "--no-index"} & set(words):
            yield f"pip installs what no hash is known of: {arguments}"


def _start(file: Dockerfile) -> Iterator[str]:
    entrypoint, command = file.entrypoint, _exec_form(file.last("CMD"))
    if entrypoint != ["lightning-sql"]:
        yield "the entry point must be lightning-sql, in its JSON form, or signals do not reach it"
        return
    try:
        name, parameters = parse(command)
        settings = settings_of(file.environment, parameters)
        ports = settings.port, parse(["prometheus"])[1]["port"]
    except (CommandError, ConfigurationError) as error:
        yield str(error)
        return
    if name != "serve":
        yield "an image that is run without a word must serve"
    for port in ports:
        if str(port) not in file.last("EXPOSE").split():
            yield f"the port {port} is not exposed"
    if f":{settings.port}/" not in file.last("HEALTHCHECK"):
        yield f"the health check asks another port than {settings.port}"


def _health(file: Dockerfile) -> Iterator[str]:
    check = file.last("HEALTHCHECK")
    if not check:
        yield "there is no health check"
    elif re.search(r"\b(curl|wget)\b", check):
        yield "the health check needs a program that the image does not have"


def _exec_form(arguments: str) -> list[str]:
    """The words of an instruction in JSON form; none where it has another."""
    try:
        words = json.loads(arguments)
    except ValueError:
        return []
    return [str(word) for word in words] if isinstance(words, list) else []


class _Ignored:
    """What a `.dockerignore` leaves out: of the patterns that match a path or a folder above it, the last decides."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._rules = [(_pattern(line.lstrip("!")), line.startswith("!")) for line in patterns]

    def __call__(self, path: str) -> bool:
        parts = path.split("/")
        above = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
        ignored = False
        for pattern, negated in self._rules:
            if any(pattern.fullmatch(part) for part in above):
                ignored = not negated
        return ignored


def _ignored_by(text: str) -> _Ignored:
    lines = (line.strip() for line in text.splitlines())
    return _Ignored(line for line in lines if line and not line.startswith("#"))


def _pattern(text: str) -> re.Pattern[str]:
    words: Mapping[str, str] = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]*\])", text.strip("/"))
    return re.compile("".join(words.get(part, part if part.startswith("[") else re.escape(part)) for part in parts))

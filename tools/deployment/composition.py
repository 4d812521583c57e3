"""Reading Compose files: services with their variables put in, as Compose itself would see them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tools.deployment.dockerfile import read_dockerfile
from tools.deployment.findings import Finding, load_yaml, relative
from tools.deployment.schemas import COMPOSE_FILES

__all__ = ["GIVEN", "Composition", "Mount", "Service", "compositions", "interpolated"]

GIVEN: Final = "given"
"""Stands for the value of a variable that whoever runs Compose must choose."""

_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)(?:(:?[-?+])([^}]*))?\}|(\w+))")


@dataclass(frozen=True, slots=True)
class Mount:
    """Something that a service sees below a folder.

    Attributes:
        source: the folder here, the name of a volume, or `GIVEN`.
        target: the folder in the container.
    """

    source: str
    target: str

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of the machine."""
        return self.source.startswith((".", "/"))


@dataclass(frozen=True, slots=True)
class Service:
    """A service of a Compose file.

    Attributes:
        raw: what stands in the file.
        ours: whether it runs our image.
        command: its arguments, as words.
        environment: its variables; None is what has no value here, but perhaps where Compose runs.
        mounts: folders and volumes.
        ports: those in the container that are published or exposed.
        secrets: the names of what is below `/run/secrets`.
    """

    name: str
    raw: Mapping[str, Any]
    ours: bool
    command: tuple[str, ...]
    environment: Mapping[str, str | None]
    mounts: tuple[Mount, ...]
    ports: frozenset[int]
    secrets: frozenset[str]

    @property
    def health_ports(self) -> set[int]:
        """The ports that its health check asks."""
        test = " ".join(map(str, self.raw.get("healthcheck", {}).get("test", ())))
        return {int(port) for port in re.findall(r"://127\.0\.0\.1:(\d+)", test)}


@dataclass(slots=True)
class Composition:
    """A Compose file.

    Attributes:
        path: where it is, as shown.
        folder: where its relative paths begin.
        raw: what stands in it.
        services: by name.
        variables: those that whoever runs it can or must set.
        problems: what was wrong with variables.
    """

    path: str
    folder: Path
    raw: Mapping[str, Any]
    services: dict[str, Service] = field(default_factory=dict)
    variables: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def interpolated(value: str) -> str:
    """A text with its variables put in: their defaults, or `GIVEN`."""

    def put_in(match: re.Match[str]) -> str:
        _, operator, default, _ = match.groups()
        return default if operator in (":-", "-") else GIVEN

    return _VARIABLE.sub(put_in, value.replace("$$", "\0")).replace("\0", "$")


def compositions(root: Path, findings: list[Finding]) -> list[Composition]:
    """Every Compose file of a checkout."""
    image = read_dockerfile(root)
    found: list[Composition] = []
    for path in sorted(root.glob(COMPOSE_FILES)):
        raw = load_yaml(path, root, findings)
        if raw is None:
            continue
        file = Composition(relative(path, root), path.parent, raw)
        for text in _texts(raw):
            for name, operator, _, bare in _VARIABLE.findall(text.replace("$$", "")):
                file.variables.add(name or bare)
                if not operator:
                    file.problems.append(f"{name or bare} has no default and is not required")
        for secret in raw.get("secrets", {}).values():
            file.variables |= {secret["environment"]} if "environment" in secret else set()
        for name, service in raw["services"].items():
            file.services[name] = _service(file, name, service, image.environment)
        found.append(file)
    return found


def _service(file: Composition, name: str, raw: Mapping[str, Any], image: Mapping[str, str]) -> Service:
    ours = "build" in raw
    command = raw.get("command") or ()
    words = shlex.split(command) if isinstance(command, str) else command
    given = raw.get("environment") or {}
    pairs = given.items() if isinstance(given, Mapping) else (_pair(entry) for entry in given)
    environment = {key: None if value is None else interpolated(str(value)) for key, value in pairs}
    file.variables |= {key for key, value in environment.items() if value is None}
    return Service(
        name=name,
        raw=raw,
        ours=ours,
        command=tuple(interpolated(str(word)) for word in words),
        environment={**image, **environment} if ours else environment,
        mounts=(
            *(_mount(entry) for entry in raw.get("volumes", ())),
            *(Mount("tmpfs", target) for target in raw.get("tmpfs", ())),
        ),
        ports=frozenset(
            int(interpolated(str(entry)).rpartition(":")[2].partition("/")[0])
            for entry in (*raw.get("ports", ()), *raw.get("expose", ()))
        ),
        secrets=frozenset(raw.get("secrets", ())),
    )


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for part in value.values():
                yield from _texts(part)
        case list():
            for part in value:
                yield from _texts(part)
        case _:
            pass


def _pair(entry: str) -> tuple[str, str | None]:
    name, separator, value = entry.partition("=")
    return name, value if separator else None


def _mount(entry: str) -> Mount:
    source, target, *_ = interpolated(entry).split(":")
    return Mount(source, target)

"""Checks of the Compose files beyond their specification."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from lightning_api.settings import ENVIRONMENT_PREFIX, Settings
from lightning_sql.errors import ConfigurationError
from tools.deployment.command_line import CommandError, parse, settings_of
from tools.deployment.composition import GIVEN, Composition, Mount, Service, compositions
from tools.deployment.findings import Finding, image_problem

__all__ = ["DOCUMENT", "check_compose", "host_file", "listens_at"]

DOCUMENT: Final = "docs/deployment.md"

_SECRET: Final = re.compile(r"(TOKEN|PASS|PASSWORD|SECRET|KEY|PGPASSWORD)$")
_PASSWORD_IN_URL: Final = re.compile(r"://[^/@\s:]*:[^/@\s]+@")
_PATH: Final = re.compile(r"(?<![\w:/.?])/(?!/)[\w./-]+")
_SQLITE: Final = "sqlite:///"


def check_compose(root: Path) -> Iterator[Finding]:
    """What is wrong with the Compose files of a checkout."""
    unreadable: list[Finding] = []
    document = root / DOCUMENT
    documented = set(re.findall(r"`(\w+)`", document.read_text())) if document.exists() else set()
    for file in compositions(root, unreadable):
        messages = [
            *file.problems,
            *_volumes(file),
            *_secrets(file),
            *(f"{name} is not explained in {DOCUMENT}" for name in sorted(file.variables - documented)),
        ]
        for service in file.services.values():
            messages += [f"{service.name}: {message}" for message in _service(file, service, root)]
        yield from (Finding(file.path, message) for message in messages)
    yield from unreadable


def listens_at(service: Service) -> int | None:
    """The port that a service of our image listens on; None if its command does not.

    Raises:
        CommandError: it would not start.
        ConfigurationError: it would not start.
    """
    name, parameters = parse(service.command)
    if name == "serve":
        environment = {key: value for key, value in service.environment.items() if value is not None}
        # What is handed on from where Compose runs: the server itself sees to it that it is there.
        handed_on = {"token": GIVEN} if service.environment.get("LIGHTNING_SQL_TOKEN", "") is None else {}
        return settings_of(environment, parameters | handed_on).checked_exposure().port
    return parameters.get("port")


def host_file(file: Composition, service: Service, path: str) -> Path | None:
    """Where a file that a service names lies here; None if it lies in no folder of this machine."""
    for mount in service.mounts:
        if mount.is_folder and (path == mount.target or path.startswith(f"{mount.target.rstrip('/')}/")):
            return file.folder / mount.source / path[len(mount.target) :].lstrip("/")
    return None


def _volumes(file: Composition) -> Iterator[str]:
    declared = set(file.raw.get("volumes") or ())
    used = {mount.source for service in file.services.values() for mount in service.mounts}
    yield from (f"the volume {name} is used by nobody" for name in sorted(declared - used))
    for service in file.services.values():
        for mount in service.mounts:
            if mount.source in (GIVEN, "tmpfs"):
                continue
            if mount.is_folder:
                if not (file.folder / mount.source).exists():
                    yield f"{service.name}: there is no {mount.source} to mount"
            elif mount.source not in declared:
                yield f"{service.name}: the volume {mount.source} is not declared"


def _secrets(file: Composition) -> Iterator[str]:
    declared = file.raw.get("secrets") or {}
    used = {name for service in file.services.values() for name in service.secrets}
    yield from (f"the secret {name} is used by nobody" for name in sorted(declared.keys() - used))
    yield from (f"the secret {name} is not declared" for name in sorted(used - declared.keys()))
    for name, secret in declared.items():
        if "environment" not in secret:
            yield f"the secret {name} must come from a variable, not from a file"


def _service(file: Composition, service: Service, root: Path) -> Iterator[str]:
    raw = service.raw
    if service.ours:
        build: Any = raw["build"]
        context = (file.folder / build["context"]).resolve()
        if context != root.resolve() or not (context / build["dockerfile"]).is_file():
            yield f"there is no {build['dockerfile']} in {build['context']}"
        yield from _our_command(service)
    elif problem := image_problem(raw.get("image", "")):
        yield problem
    if not raw.get("healthcheck", {}).get("test"):
        yield "there is no health check"
    if raw.get("restart") != "unless-stopped":
        yield "it is not restarted"
    if raw.get("read_only") and any("environment" in file.raw["secrets"].get(name, {}) for name in service.secrets):
        yield "Compose cannot write a secret into a container that is read-only"
    yield from _ports(service)
    yield from _plain_secrets(service)
    yield from _paths(file, service)
    for name, condition in _dependencies(raw).items():
        if name not in file.services:
            yield f"it depends on {name}, which is not there"
        elif condition == "service_healthy" and not file.services[name].raw.get("healthcheck"):
            yield f"it waits until {name} is healthy, which has no health check"


def _dependencies(raw: Any) -> dict[str, str]:
    given = raw.get("depends_on", {})
    return {name: given[name]["condition"] for name in given} if isinstance(given, dict) else dict.fromkeys(given, "")


def _our_command(service: Service) -> Iterator[str]:
    try:
        port = listens_at(service)
    except (CommandError, ConfigurationError) as error:
        yield str(error)
        return
    if port is not None and service.ports != {port}:
        yield f"it listens on {port}, but {', '.join(map(str, sorted(service.ports))) or 'nothing'} is published"
    known = {f"{ENVIRONMENT_PREFIX}{setting.name.upper()}" for setting in fields(Settings)}
    for name in service.environment:
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            yield f"{name} is no setting"
    # What the image has from the start counts for the server only.
    database = (service.environment.get("LIGHTNING_SQL_DATABASE_URL") or "") if service.command[0] == "serve" else ""
    if database.startswith(_SQLITE) and not _is_kept(service, database.removeprefix(_SQLITE)):
        yield f"{database} lies in no volume, and is gone with the container"
    directory = service.environment.get("PROMETHEUS_MULTIPROC_DIR")
    if directory is not None and _mount_of(service, directory) is None:
        yield f"{directory} lies in no volume, and nobody else sees it"


def _ports(service: Service) -> Iterator[str]:
    if not service.ports:
        yield "no port is published or exposed"
    for port in sorted(service.health_ports - service.ports):
        yield f"the health check asks port {port}, which is not its own"
    for entry in service.raw.get("ports", ()):
        if not re.match(r"\$\{\w+:-127\.0\.0\.1:\d+\}:\d+$", str(entry)):
            yield f"the port {entry} is not on 127.0.0.1 unless told otherwise"


def _plain_secrets(service: Service) -> Iterator[str]:
    given = service.raw.get("environment") or {}
    pairs = given.items() if isinstance(given, dict) else (entry.split("=", 1) for entry in given if "=" in entry)
    for name, value in pairs:
        text = "" if value is None else str(value)
        if _SECRET.search(name) and value is not None and not re.fullmatch(r"\$\{\w+:\?[^}]+\}", text):
            yield f"{name} is written down"
        if _PASSWORD_IN_URL.search(text):
            yield f"there is a password in {name}"


def _paths(file: Composition, service: Service) -> Iterator[str]:
    """Files that are named in commands and variables."""
    words = () if service.ours else service.command
    for text in (*words, *(value for value in service.environment.values() if value and not service.ours)):
        for path in _PATH.findall(text):
            secret = path.removeprefix("/run/secrets/")
            if secret != path:
                if secret not in service.secrets:
                    yield f"{path} is no secret of it"
            elif _mount_of(service, path) is None:
                yield f"{path} lies in no volume"
            elif (source := host_file(file, service, path)) is not None and not source.exists():
                yield f"there is no {source.relative_to(file.folder)}, which would be {path}"


def _mount_of(service: Service, path: str) -> Mount | None:
    for mount in service.mounts:
        if path == mount.target or path.startswith(f"{mount.target.rstrip('/')}/"):
            return mount
    return None


def _is_kept(service: Service, path: str) -> bool:
    mount = _mount_of(service, path)
    return mount is not None and mount.source != "tmpfs"

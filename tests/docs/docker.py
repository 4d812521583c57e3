"""Reading the `docker` commands of the docs: what they name must exist, and be spelt as Docker knows it.

Nothing is run, as that needs a Docker engine.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Final

from tests.commands import ROOT
from tools.deployment.command_line import parse
from tools.deployment.composition import Composition, compositions
from tools.deployment.dockerfile import DOCKERFILE, read_dockerfile

OF_BUILD: Final = {"-f": True, "-t": True}
OF_RUN: Final = {"--rm": False, "-p": True, "-v": True, "-e": True}
OF_COMPOSE: Final[Mapping[str, Mapping[str, bool]]] = {
    "up": {"--build": False, "--detach": False},
    "down": {},
    "stop": {},
    "logs": {},
    "cp": {},
    "run": {"--rm": False, "--build": False},
}
"""The options that the docs use, and whether each takes a value."""


def read_docker_command(line: str) -> None:
    """Fail where a command could not be what it is meant to be."""
    words = shlex.split(line)
    given: set[str] = set()
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        given.add(words.pop(0).partition("=")[0])
    match words:
        case ["docker", "build", *rest]:
            options, operands = _options(rest, OF_BUILD)
            assert options["-f"] == [DOCKERFILE]
            assert operands == ["."], "the image is built from the whole checkout"
        case ["docker", "run", *rest]:
            _run(rest)
        case ["docker", "compose", "-f", name, verb, *rest]:
            file = next(file for file in compositions(ROOT, []) if file.path == name)
            assert given <= file.variables, f"{name} knows nothing of {given - file.variables}"
            _compose(file, verb, rest)
        case _:
            raise AssertionError(f"a docker command that nothing reads: {line}")


def _run(words: list[str]) -> None:
    options, [image, *command] = _options(words, OF_RUN)
    assert image == "lightning-sql"
    dockerfile = read_dockerfile(ROOT)
    for port in options["-p"]:
        assert port.rpartition(":")[2] in dockerfile.last("EXPOSE").split()
    for volume in options["-v"]:
        assert volume.rpartition(":")[2] in dockerfile.last("VOLUME")
    if command:
        parse(command)


def _compose(file: Composition, verb: str, words: list[str]) -> None:
    _, operands = _options(words, OF_COMPOSE[verb])
    match verb, operands:
        case "cp", [source, _]:
            name, _, folder = source.partition(":")
            assert folder in {mount.target for mount in file.services[name].mounts}
        case "run", [name, *command]:
            assert file.services[name].ours
            parse(command)
        case _, names:
            assert set(names) <= file.services.keys()


def _options(words: list[str], known: Mapping[str, bool]) -> tuple[dict[str, list[str]], list[str]]:
    """The values of the options in front, and what stands behind them."""
    options: dict[str, list[str]] = {name: [] for name in known}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name = rest.pop(0)
        options[name].append(rest.pop(0) if known[name] else "")
    return options, rest

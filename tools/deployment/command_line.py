"""Reading a `lightning-sql …` that stands in a file as the command itself would, without doing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import rich_click as click

from lightning_api.cli import cli
from lightning_api.settings import Settings

__all__ = ["CommandError", "parse", "settings_of"]


class CommandError(Exception):
    """The command would refuse these arguments; the message says why."""


def parse(arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The subcommand that arguments come to, `migrate up` for example, and its parameters.

    Raises:
        CommandError: there is no such command, or it does not take them.
    """
    command: click.Command = cli
    names: list[str] = []
    rest = list(arguments)
    while isinstance(command, click.Group):
        if not rest:
            raise CommandError(f"{' '.join(['lightning-sql', *names])} needs a subcommand")
        names.append(rest.pop(0))
        found = command.commands.get(names[-1])
        if found is None:
            raise CommandError(f"there is no lightning-sql {' '.join(names)}")
        command = found
    try:
        return " ".join(names), dict(command.make_context(names[-1], rest).params)
    except click.ClickException as error:
        raise CommandError(f"lightning-sql {' '.join(names)}: {error.message}") from None


def settings_of(environment: Mapping[str, str], parameters: Mapping[str, Any]) -> Settings:
    """The settings with which `lightning-sql serve` would run.

    Raises:
        ConfigurationError: it would refuse them.
    """
    return Settings.load(environment, **{name: value for name, value in parameters.items() if value != ()})

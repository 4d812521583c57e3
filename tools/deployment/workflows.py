"""Checks of the workflows beyond their specification: what they do, anybody can do with make."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

from tools.deployment.findings import Finding, load_yaml, relative
from tools.deployment.schemas import WORKFLOWS

__all__ = ["check_workflows", "commands_of"]

_TARGET: Final = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
_EXPRESSION: Final = re.compile(r"\$\{\{\s*([\w.-]+)\s*\}\}")
_SUMMARY: Final = "GITHUB_STEP_SUMMARY"


def check_workflows(root: Path) -> Iterator[Finding]:
    """What is wrong with the workflows of a checkout."""
    targets = set(_TARGET.findall((root / "Makefile").read_text()))
    findings: list[Finding] = []
    for path in sorted(root.glob(WORKFLOWS)):
        workflow = load_yaml(path, root, findings)
        if workflow is not None:
            findings += (Finding(relative(path, root), message) for message in _workflow(workflow, targets))
    yield from findings


def commands_of(job: Any) -> Iterator[str]:
    """Every command of a job, for each of its combinations.

    Raises:
        KeyError: it names something that is no part of the matrix.
    """
    for chosen in _combinations(job):
        for step in job["steps"]:
            for line in step.get("run", "").splitlines():
                yield _chosen(line, chosen)


def _chosen(line: str, values: Mapping[str, str]) -> str:
    return _EXPRESSION.sub(lambda match: values[match[1]], line)


def _combinations(job: Any) -> Iterator[Mapping[str, str]]:
    matrix = {name: values for name, values in job.get("strategy", {}).get("matrix", {}).items() if name != "include"}
    for values in product(*matrix.values()):
        yield {f"matrix.{name}": str(value) for name, value in zip(matrix, values, strict=True)}


def _workflow(workflow: Any, targets: set[str]) -> Iterator[str]:
    if workflow.get("permissions") != {"contents": "read"}:
        yield "it may do more than read: permissions must be contents: read"
    for name, job in workflow["jobs"].items():
        if "timeout-minutes" not in job:
            yield f"{name}: it may run for hours: give it timeout-minutes"
        for step in job["steps"]:
            if "uses" in step and not re.search(r"@v\d+$|@[0-9a-f]{40}$", step["uses"]):
                yield f"{name}: {step['uses']} has no version"
        try:
            for command in dict.fromkeys(commands_of(job)):
                yield from (f"{name}: {problem}" for problem in _command(command, targets))
        except KeyError as error:
            yield f"{name}: {error.args[0]} is not in the matrix"


def _command(command: str, targets: set[str]) -> Iterator[str]:
    words = shlex.split(command)
    if words[:1] != ["make"] or len(words) < 2:
        yield f"not by make, and so by nobody else: {command}"
    elif words[1] not in targets:
        yield f"the Makefile has no {words[1]}"
    rest = command.partition(">>")[2].strip()
    if ">" in command and rest != f'"${_SUMMARY}"':
        yield f"its output goes where nobody sees it: {command}"

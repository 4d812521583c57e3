"""`python -m bench.summaries`: the lines of JSON that the bench families append, as one table in Markdown."""

# rich_click leaves out a type parameter of click's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import rich_click as click

from bench import families
from bench.processes import BenchError
from bench.report import number

HEADINGS: Final = (
    *("benchmark", "parameters", "backend", "tasks", "succeeded", "failed"),
    *("seconds", "per second", "P50 ms", "P95 ms", "P99 ms"),
)
FIRST_FIGURE: Final = 3


@click.command(context_settings=families.CONTEXT)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
def main(files: tuple[Path, ...]) -> int:
    """Print the results in FILES as a table; exit with 1 if a task of any failed."""
    results = [result for file in files for result in read(file)]
    if not results:
        raise BenchError("there is no result in these files")
    for line in table(results):
        print(line)
    complete = all(result["succeeded"] == result["tasks"] and not result["failed"] for result in results)
    return 0 if complete else families.EXIT_FAILED_TASKS


def read(file: Path) -> Iterator[dict[str, Any]]:
    """The results in a file, in the order in which they were appended.

    Raises:
        BenchError: it cannot be read, or something else is in it.
    """
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise BenchError(f"{file} cannot be read: {error.strerror}") from None
    for number_, line in enumerate(lines, 1):
        try:
            result = json.loads(line)
            cells_of(result)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BenchError(f"{file}, line {number_}, is no result of a bench family") from None
        yield result


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield _row(HEADINGS)
    yield _row("---" if column < FIRST_FIGURE else "---:" for column in range(len(HEADINGS)))
    for result in results:
        yield _row(cells_of(result))


def cells_of(result: Mapping[str, Any]) -> tuple[str, ...]:
    """What stands in a result's row."""
    parameters = ", ".join(f"{name} {value}" for name, value in result["parameters"].items())
    latencies = (None if result[name] is None else result[name] * 1000 for name in ("p50", "p95", "p99"))
    return (
        f"{result['family']} {result['name']}",
        parameters,
        result["backend"],
        *(f"{result[name]:,}" for name in ("tasks", "succeeded", "failed")),
        *(number(value) for value in (result["seconds"], result["per_second"], *latencies)),
    )


def _row(cells: Iterator[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


if __name__ == "__main__":
    families.launch(main, "bench.summaries")

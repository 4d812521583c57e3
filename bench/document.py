"""Writes `docs/performance.md`: the tables anew, what was written by hand as it was."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from bench.machine import Machine
from bench.report import goal, number, times, verdict
from bench.results import Figure, Samples

SECTIONS: Final = {
    "where the time goes": "## Where the time goes",
    "below the target": "## What is below its target, and why",
}
"""The parts that are written by hand, with their headings."""
_KEPT: Final = re.compile(r"<!-- by hand: (?P<name>[^>]*?) -->\n(?P<text>.*?)<!-- end -->", re.DOTALL)

_PRESETS: Final = re.compile(r"<!-- presets -->\n.*?<!-- end of presets -->\n", re.DOTALL)

_GROUPS: Final = (
    (
        "Cycles",
        ("cycle.", "cycle_cpu."),
        (
            "A cycle is what a runner does for a rollout: enqueue, claim, eight spans of 1.2 KB, the attempt's end; "
            "eleven requests. 32 runners. The *lean* driver sends the upstream client's requests as prepared bytes, so "
            "that less of the machine is the client's; *upstream* is its own client, unmodified."
        ),
    ),
    (
        "One client alone",
        ("latency.", "overhead."),
        (
            "`overhead` is our median less that of a bare durable commit of one row on the same database in the same "
            "run, in relation to all of the upstream's, which keeps nothing."
        ),
    ),
    ("Several clients", tuple(f"{name}.c" for name in ("enqueue", "dequeue", "next", "span", "update")), ""),
    (
        "Many spans at once",
        ("bulk.", "bulk_raw.", "many_spans."),
        (
            "`bulk` is `POST /v1/lightning/spans` with a hundred spans, as a JSON document or a line each, against the "
            "upstream client's `add_many_spans`, which makes a request of each; `bulk_raw` is against `INSERT … SELECT "
            "FROM unnest(…)` of the same spans by asyncpg into a table with the same columns and indexes. `many_spans` "
            "is a request each on both sides."
        ),
    ),
    (
        "Reading",
        ("read_spans.", "page."),
        (
            "A page has the hundred newest rollouts of a status, each with its latest attempt. Both stores hold the "
            "same rollouts."
        ),
    ),
    (
        "Growth",
        ("growth.",),
        "One client, with more and more finished rollouts, attempts and spans in the database.",
    ),
    (
        "Without a server",
        ("in_process.",),
        (
            "The store's own methods, records in and records out. The raw statement is one hand-written claim (lock, "
            "update, attempt, worker) by asyncpg on the same tables with 16 connections. PGQueuer's clock stops with "
            "its last job."
        ),
    ),
    ("Metrics", ("tracking.",), "The same cycles on a server with `--tracker prometheus`, against one without."),
)


def write(path: Path, machine: Machine, figures: Sequence[Figure], samples: Samples, rounds: int) -> None:
    """Write the document over the one that is there, whose parts by hand are kept."""
    text = path.read_text() if path.exists() else ""
    presets = [found[0]] if (found := _PRESETS.search(text)) else []
    written = [*_head(machine, samples, rounds), *_goals(figures), *_tables(figures), *presets, *_by_hand(_kept(text))]
    path.write_text("\n".join(written))


def write_presets(path: Path, lines: Sequence[str]) -> None:
    """Write the part about the presets over the one that is there, or before the parts by hand; all else is kept."""
    text = path.read_text() if path.exists() else "# Performance\n\n"
    part = "\n".join(["<!-- presets -->", *lines, "<!-- end of presets -->", ""])
    if _PRESETS.search(text):
        path.write_text(_PRESETS.sub(lambda _: part, text))
        return
    before, mark, after = text.partition("<!-- by hand: ")
    path.write_text(f"{before}{part}\n{mark}{after}")


def _kept(text: str) -> dict[str, str]:
    return {match["name"]: match["text"] for match in _KEPT.finditer(text)}


def _head(machine: Machine, samples: Samples, rounds: int) -> list[str]:
    return [
        "# Performance",
        "",
        "Written by `python -m bench.compare`; only the parts between the marks at the end are written by hand.",
        "",
        (
            f"Every figure is a median of {rounds} round{'s' if rounds > 1 else ''}, all targets measured once in each "
            "and in an order that rotates, and stands beside the other's figure of the same run: read the ratios. The "
            "upstream server is Agent Lightning 0.3.0's own, storing in memory, in one process, as its command line "
            "runs it. Ours runs with its defaults, logging included. Drivers run in a process of their own "
            f"on the same machine. Each of the {samples.calls:,} calls was checked: status, ids, that no rollout was "
            f"claimed twice, that every span was stored and every attempt ended; {samples.failed or 'none'} failed."
        ),
        "",
        *(f"- {line}" for line in machine.lines()),
        "",
    ]


def table_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _goals(figures: Sequence[Figure]) -> list[str]:
    judged = [figure for figure in figures if figure.floor is not None and figure.ratio is not None]
    if not judged:
        return []
    met = [sum(figure.verdict == level for figure in judged) for level in ("target", "floor", "below")]
    lines = [
        "## Goals",
        "",
        (
            f"Of {len(judged)} ratios with a floor and a target, {met[0]} reach the target, {met[1]} the floor only, "
            f"and {met[2]} neither."
        ),
        "",
        table_row(["metric", "against", "ratio", "floor (target)", ""]),
        "|---|---|--:|--:|---|",
    ]
    lines += [
        table_row([f"`{figure.name}`", figure.against, times(figure.ratio), goal(figure), verdict(figure)])
        for figure in judged
    ]
    return [*lines, ""]


def _tables(figures: Sequence[Figure]) -> list[str]:
    lines: list[str] = []
    for title, prefixes, text in _GROUPS:
        group = [figure for figure in figures if figure.name.startswith(prefixes)]
        if not group:
            continue
        lines += [f"## {title}", "", *([text, ""] if text else [])]
        if title == "Growth":
            lines += _growth(group)
            continue
        lines += [table_row(["metric", "unit", "ours", "other", "ratio", "other is"]), "|---|---|--:|--:|--:|---|"]
        for figure in group:
            cells = [f"`{figure.name}`", _unit(figure), number(figure.ours), number(figure.peer), times(figure.ratio)]
            lines.append(table_row([*cells, figure.note or figure.against]))
        lines.append("")
    return lines


def _unit(figure: Figure) -> str:
    """The unit, with the parts that were measured beside the figure itself."""
    names = {
        "driver_cpu": "client CPU ms",
        "server_cpu": "server",
        "database_cpu": "database",
        "less": "commit",
        "peer_lean": "other with lean driver",
    }
    values = figure.extra | ({} if figure.less is None else {"less": figure.less})
    parts = [f"{names[name]} {number(value)}" for name, value in values.items() if name in names]
    return f"{figure.unit} ({', '.join(parts)})" if parts else figure.unit


def _growth(figures: Sequence[Figure]) -> list[str]:
    """A row for each operation and database, a column for each size."""
    rows: dict[tuple[str, str], dict[str, Figure]] = {}
    for figure in figures:
        _, operation, size, kind = figure.name.split(".")
        rows.setdefault((operation, kind), {})[size] = figure
    sizes = list(dict.fromkeys(size for row in rows.values() for size in row))
    first = figures[0].against.removeprefix("at ").removesuffix(" rollouts")
    lines = [
        table_row(["median, ms", first, *sizes, f"{sizes[-1]} to {first}"]),
        "|---|" + "--:|" * (len(sizes) + 2),
    ]
    for (operation, kind), row in rows.items():
        base = next(iter(row.values()))
        cells = [number(row[size].ours) if size in row else "–" for size in sizes]
        last = row.get(sizes[-1], base)
        label = f"{operation}, {kind}"
        lines.append(table_row([label, number(base.peer), *cells, last.note or times(last.ratio)]))
    return [*lines, ""]


def _by_hand(kept: dict[str, str]) -> list[str]:
    """The parts by hand: those that this document always has, then any others that were there."""
    lines: list[str] = []
    for name in [*SECTIONS, *(name for name in kept if name not in SECTIONS)]:
        text = kept.get(name, f"{SECTIONS.get(name, '')}\n")
        lines += [f"<!-- by hand: {name} -->", f"{text}<!-- end -->", ""]
    return lines

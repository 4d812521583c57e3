"""The table on the terminal, and how figures are written."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bench.results import Figure, Samples

_COLOURS = {"target": "green", "floor": "yellow", "below": "red"}
_WORDS = {"target": "target met", "floor": "floor met", "below": "below the floor"}


def number(value: float | None) -> str:
    """A figure with three significant digits, thousands apart."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def times(ratio: float | None) -> str:
    """A ratio."""
    return "–" if ratio is None else f"{number(ratio)}×"


def goal(figure: Figure) -> str:
    """The floor and the target of a figure, as ratios."""
    if figure.floor is None or figure.target is None:
        return ""
    sign = "≥" if figure.better == "more" else "≤"
    if figure.floor == figure.target:
        return f"{sign} {number(figure.floor)}"
    return f"{sign} {number(figure.floor)} ({number(figure.target)})"


def verdict(figure: Figure) -> str:
    """What of its goal a figure reaches, in words."""
    if figure.verdict is None:
        return "not measured" if figure.floor is not None else ""
    return _WORDS[figure.verdict]


def show(console: Console, figures: Sequence[Figure], samples: Samples, seconds: float) -> None:
    """Print the figures, what of the goals they reach, and what failed."""
    table = Table(title="Ours beside the others, medians", title_justify="left", row_styles=["", "dim"])
    table.add_column("metric", no_wrap=True)
    table.add_column("unit", overflow="fold")
    for heading in ("ours", "other", "ratio", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("against, verdict", overflow="fold")
    for figure in figures:
        colour = _COLOURS.get(figure.verdict or "", "")
        words = figure.note or "; ".join(part for part in (figure.against, verdict(figure)) if part)
        ratio = f"[{colour}]{times(figure.ratio)}[/]" if colour else times(figure.ratio)
        table.add_row(*(figure.name, figure.unit, number(figure.ours), number(figure.peer), ratio, goal(figure), words))
    console.print(table)
    console.print(f"{samples.calls:,} calls in {seconds:.0f} s, {samples.failed} failed")
    for failure in samples.failures:
        console.print(f"[red]{failure}[/]", highlight=False)

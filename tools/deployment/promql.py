"""Checks of PromQL: that an expression parses, and asks for metrics that there are, by labels that they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import promql_parser as promql
import yaml

from lightning_sql.metrics import METRICS, Metric
from tools.deployment.exporters import EXPORTED

__all__ = ["Known", "QueryError", "known_metrics", "labels_of"]

TARGET: Final = frozenset({"job", "instance"})
"""The labels that Prometheus itself gives to everything."""

QUERIES: Final = "docker/postgres-exporter/queries.yaml"

_RATES: Final = frozenset({"rate", "irate", "increase", "resets"})
_PLAIN: Final = frozenset({"absent", "absent_over_time"})
_SETS: Final = frozenset({"and", "or", "unless"})


class QueryError(Exception):
    """An expression cannot give what is expected of it; the message says why."""


@dataclass(frozen=True, slots=True)
class Known:
    """A series that somebody exports.

    Attributes:
        grows: whether it only ever grows: a counter, or a part of a histogram.
        labels: those that it may have, with the target's.
    """

    grows: bool
    labels: frozenset[str]


def known_metrics(root: Path) -> dict[str, Known]:
    """Every series that there is to ask for: ours, the exporters', and what we have the exporter ask PostgreSQL."""
    found = {name: Known(grows, TARGET | set(labels)) for name, (grows, labels) in EXPORTED.items()}
    for metric in METRICS:
        for name, labels in _series(metric):
            found[name] = Known(metric.kind != "gauge", TARGET | set(labels))
    for query, asked in yaml.safe_load((root / QUERIES).read_text()).items():
        columns = {name: column["usage"] for entry in asked["metrics"] for name, column in entry.items()}
        labels = {name for name, usage in columns.items() if usage == "LABEL"}
        for name, usage in columns.items():
            if usage != "LABEL":
                found[f"{query}_{name}"] = Known(usage == "COUNTER", TARGET | labels | {"server"})
    return found


def _series(metric: Metric) -> Iterable[tuple[str, tuple[str, ...]]]:
    name = metric.name.replace(".", "_")
    match metric.kind:
        case "gauge":
            yield name, metric.labels
        case "counter":
            yield f"{name.removesuffix('_total')}_total", metric.labels
        case "histogram":
            yield f"{name}_bucket", (*metric.labels, "le")
            yield f"{name}_sum", metric.labels
            yield f"{name}_count", metric.labels


def labels_of(expression: str, known: Mapping[str, Known]) -> frozenset[str]:
    """The labels that the result of an expression may have.

    Raises:
        QueryError: it does not parse, or asks for what there is not.
    """
    try:
        parsed = promql.parse(expression)
    except ValueError as error:
        raise QueryError(f"{error}: {expression}") from None
    return _Reader(known, expression).labels(parsed)


class _Reader:
    def __init__(self, known: Mapping[str, Known], expression: str) -> None:
        self._known = known
        self._expression = expression

    def labels(self, node: Any, function: str = "") -> frozenset[str]:
        """What labels a part of the expression may have, inside a function."""
        match node:
            case promql.VectorSelector():
                return self._selector(node, function)
            case promql.MatrixSelector():
                return self._selector(node.vector_selector, function)
            case promql.Call():
                return self._call(node)
            case promql.AggregateExpr():
                return self._aggregate(node)
            case promql.BinaryExpr():
                return self._binary(node)
            case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
                return self.labels(node.expr, function)
            case _:
                return frozenset()

    def _selector(self, node: Any, function: str) -> frozenset[str]:
        known = self._known.get(node.name)
        if known is None:
            raise self._error(f"nobody exports {node.name}")
        if known.grows and function not in _RATES | _PLAIN:
            raise self._error(f"{node.name} only ever grows: take its rate")
        if not known.grows and function in _RATES:
            raise self._error(f"{node.name} goes up and down: it has no {function}")
        self._has(known.labels, (matcher.name for matcher in node.matchers.matchers), node.name)
        return known.labels

    def _call(self, node: Any) -> frozenset[str]:
        name = node.func.name
        arguments = [self.labels(argument, name) for argument in node.args]
        labels = frozenset[str]().union(*arguments)
        if name == "histogram_quantile":
            if "le" not in arguments[1]:
                raise self._error("a quantile needs the buckets: keep the label le")
            return labels - {"le"}
        return frozenset() if name in ("scalar", "vector", "time") else labels

    def _aggregate(self, node: Any) -> frozenset[str]:
        labels = self.labels(node.expr)
        if node.modifier is None:
            return labels if str(node.op) in ("topk", "bottomk") else frozenset()
        named = frozenset(node.modifier.labels)
        self._has(labels, named, "what is summed up")
        return named if node.modifier.type == promql.AggModifierType.By else labels - named

    def _binary(self, node: Any) -> frozenset[str]:
        left, right = self.labels(node.lhs), self.labels(node.rhs)
        modifier = node.modifier
        named = None if modifier is None or modifier.matching is None else frozenset(modifier.matching.labels)
        if named is not None:
            self._has(left & right, named, "both sides")
        if str(node.op).strip() in _SETS:
            return left | right if str(node.op).strip() == "or" else left
        return left or right

    def _has(self, labels: AbstractSet[str], wanted: Iterable[str], what: str) -> None:
        for label in wanted:
            if label not in labels:
                raise self._error(f"{what} has no label {label}")

    def _error(self, message: str) -> QueryError:
        return QueryError(f"{message}: {' '.join(self._expression.split())}")

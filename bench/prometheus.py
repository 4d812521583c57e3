"""Asks a Prometheus server over its HTTP API."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
from yarl import URL

from bench.processes import BenchError

__all__ = ["Prometheus", "duration_of", "instant_of"]

QUERY_SECONDS: Final = 60.0

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

Labels = tuple[str, ...]
Vector = dict[Labels, float]
"""A value for each combination of labels."""


class Prometheus:
    """A Prometheus server.

    Args:
        url: its address, with the prefix of its paths if it has one.
    """

    def __init__(self, url: str) -> None:
        self._url = URL(url)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=QUERY_SECONDS, sock_connect=5))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    @property
    def address(self) -> str:
        """Where it is, as it may be shown: without a user and a password."""
        return str(self._url.with_user(None))

    async def query(self, expression: str, at: float, labels: Labels) -> Vector:
        """Evaluate an expression whose value is an instant vector.

        Args:
            expression: in PromQL.
            at: when, in seconds since the epoch.
            labels: the names of the labels that tell its elements apart.

        Raises:
            BenchError: Prometheus cannot be asked, or refuses the expression.
        """
        answer = await self._asked("query", {"query": expression, "time": f"{at:.3f}"})
        try:
            return {
                tuple(element["metric"].get(label, "") for label in labels): float(element["value"][1])
                for element in answer["result"]
            }
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise BenchError(f"{self.address} does not answer as Prometheus does") from None

    async def _asked(self, what: str, parameters: Mapping[str, str]) -> Any:
        assert self._session is not None
        try:
            async with self._session.post(self._url / "api" / "v1" / what, data=parameters) as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BenchError(f"no Prometheus answers at {self.address}: {error or type(error).__name__}") from None
        try:
            answer = json.loads(body)
            if answer["status"] == "success":
                return answer["data"]
            reason = answer["error"]
        except (ValueError, KeyError, TypeError):
            raise BenchError(f"{self.address} does not answer as Prometheus does: status {response.status}") from None
        raise BenchError(f"Prometheus refuses: {reason}")


def duration_of(text: str) -> float:
    """Seconds of a duration such as `90s`, `10m` or `1h30m`.

    Raises:
        ValueError: it is none.
    """
    if not re.fullmatch(r"(\d+(\.\d+)?[smhd])+", text):
        raise ValueError(f"{text!r} is no duration such as 90s, 10m or 1h30m")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", text))
    if seconds <= 0:
        raise ValueError(f"{text!r} is no time at all")
    return seconds


def instant_of(text: str) -> float:
    """Seconds since the epoch of `now`, of such a number, or of an ISO 8601 time, which is UTC unless it says more.

    Raises:
        ValueError: it is none of them.
    """
    if text == "now":
        return time.time()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is no time such as 2026-01-31T12:00:00Z, 1767225600 or now") from None
    return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()

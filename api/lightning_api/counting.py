"""Counting and timing requests, whatever answers them."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any, Final, cast

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from lightning_sql.metrics import HTTP_CALLS, HTTP_LATENCY, Recorder

__all__ = ["OTHER", "Counting", "note_route"]

OTHER: Final = "other"
"""Stands for what no route is, and for methods that none has: there are as many of them as anybody likes to send."""

_ROUTE: Final = "lightning_sql.route"
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_GONE: Final = "499"


def note_route(scope: Scope, template: str, parameters: Mapping[str, str]) -> None:
    """Say which route a request has come to; the latest attempt has a name of its own (CONTRACT.md section 10)."""
    if parameters.get("attempt_id") == "latest":
        template = template.replace("{attempt_id}", "latest")
    cast(dict[str, Any], scope)[_ROUTE] = template


class Counting:
    """An ASGI layer around the whole application.

    Args:
        app: what is behind it.
        recorder: who takes it down.
    """

    def __init__(self, app: ASGIApp, recorder: Recorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = perf_counter()
        status = _GONE

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            status = "500"
            raise
        finally:
            seconds = perf_counter() - started
            request = cast(dict[str, Any], scope)
            method = request["method"]
            labels = request.get(_ROUTE, OTHER), method if method in _METHODS else OTHER, status
            self._recorder.count(HTTP_CALLS, labels)
            self._recorder.observe(HTTP_LATENCY, labels, seconds)

"""A client's connection, whose calls are refused early where the process has taken on enough."""

from __future__ import annotations

import asyncio
from collections.abc import Set as AbstractSet
from http import HTTPStatus
from typing import Any, Final, cast

import uvicorn
from typing_extensions import override
from uvicorn.server import ServerState

from lightning_api.connections import Connection
from lightning_api.edge import OVERLOADED
from lightning_api.load import CLAIM_PATH, Load
from lightning_api.replies import Reply

__all__ = ["LightningProtocol"]


class _Answered:
    """Stands for a request that is answered, of which nothing that still arrives matters."""

    response_started: Final = True
    response_complete: Final = True
    message_event: Final = asyncio.Event()


_ANSWERED: Final = _Answered()


def _wire(reply: Reply) -> bytes:
    lines = [b"HTTP/1.1 %d %b" % (reply.status, HTTPStatus(reply.status).phrase.encode())]
    lines += [b"%b: %b" % header for header in reply.headers]
    lines.append(b"content-length: %d" % len(reply.body))
    return b"\r\n".join((*lines, b"", reply.body))


_CLAIM: Final = CLAIM_PATH.encode()
_REFUSALS: Final = {prefix.encode(): _wire(reply) for prefix, reply in OVERLOADED.items()}


class LightningProtocol(Connection):
    """One connection.

    To refuse a call as an application does costs so much that a process would do little else, where it is offered many
    times what it can take. So that most of those are answered here, as the application would.

    Args:
        config: uvicorn's own.
        server_state: uvicorn's own.
        app_state: uvicorn's own.
        load: what the process has taken on.
        unlimited: the paths that are served nonetheless.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        load: Load,
        unlimited: AbstractSet[str],
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._load = load
        self._unlimited = frozenset(path.encode() for path in unlimited)

    @override
    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self._load.is_nearly_full and (refusal := self._refusal()) is not None:
            self._in_head = False
            self._load.refused += 1
            self.transport.write(refusal)
            self.cycle = cast(Any, _ANSWERED)
            self.on_response_complete()
        else:
            self._load.expect(self.loop)
            super().on_headers_complete()

    def _refusal(self) -> bytes | None:
        """How to refuse the request, where there is nothing else to look at."""
        path, _, _ = self.url.partition(b"?")
        if path != _CLAIM and not self._load.will_be_full:
            return None
        refusal = next((wire for prefix, wire in _REFUSALS.items() if path.startswith(prefix)), None)
        if refusal is None or b"%" in path or path in self._unlimited:
            return None
        answered: Any = self.cycle  # None before the first
        if self.pipeline or not (answered is None or answered.response_complete):
            return None
        if self.flow.write_paused:  # whoever takes no answers is not asked for more requests
            return None
        parser: Any = self.parser
        if parser.get_http_version() != "1.1" or not parser.should_keep_alive() or self.expect_100_continue:
            return None
        # A page must be told that it may read the answer, and some want every answer in the log.
        return None if self.access_log or any(name == b"origin" for name, _ in self.headers) else refusal

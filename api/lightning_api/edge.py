"""What every request passes before it is routed: cross-origin rules, the token, and trailing slashes."""

from __future__ import annotations

import hmac
from typing import Final, cast

from litestar.exceptions import MethodNotAllowedException, NotFoundException
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from lightning_api.replies import Reply
from lightning_api.shortcuts import Shortcuts

__all__ = ["UNGUARDED", "Edge", "is_known_path"]

UNGUARDED: Final = frozenset({"/v1/agl/health", "/healthz", "/readyz"})
"""The paths that need no token."""

_EXPOSED: Final = b"*, Allow, Content-Encoding, Location, Retry-After, WWW-Authenticate"
_METHODS: Final = b"DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
_PREFLIGHT_SECONDS: Final = b"600"


def is_known_path(scope: Scope, path: str) -> bool:
    """Whether the application has a route at a path, for whatever method."""
    try:
        scope["litestar_app"].asgi_router.handle_routing(path=path, method="GET")
    except MethodNotAllowedException:
        return True
    except NotFoundException:
        return False
    return True


class Edge:
    """The outermost ASGI layer.

    Args:
        app: what is behind it.
        shortcuts: what of that can be reached directly.
        cors_origins: the origins whose pages may call, with credentials; `*` is any, none turns CORS off.
        token: the bearer token to ask for, or None.
    """

    def __init__(self, app: ASGIApp, shortcuts: Shortcuts, *, cors_origins: tuple[str, ...], token: str | None) -> None:
        self._app = app
        self._shortcuts = shortcuts
        self._cors = bool(cors_origins)
        self._any_origin = "*" in cors_origins
        self._origins = frozenset(origin.encode() for origin in cors_origins)
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = cast(HTTPScope, scope)
        if self._cors and (origin := _header(request, b"origin")) is not None:
            allowed = self._any_origin or origin in self._origins
            if request["method"] == "OPTIONS" and _header(request, b"access-control-request-method") is not None:
                await _preflight(request, origin if allowed else None).send(send)
                return
            send = _with_headers(send, _cors_headers(origin) if allowed else [(b"vary", b"Origin")])
        reply = self._refusal(request)
        if reply is None:
            await (self._shortcuts.find(request) or self._app)(scope, receive, send)
        else:
            await reply.send(send)

    def _refusal(self, scope: HTTPScope) -> Reply | None:
        path = scope["path"]
        if self._token is not None and path not in UNGUARDED and not self._authorized(scope):
            return Reply.json(401, {"detail": "A valid bearer token is required"}, {"www-authenticate": "Bearer"})
        raw = scope["raw_path"].partition(b"?")[0]
        if b"%" in raw and b"%2f" in raw.lower():
            # An escaped slash belongs to an id, and no id in a path has any; unescaped, it would name another route.
            return _not_found()
        if path.endswith("/") and path != "/":
            return _redirect(scope, path, raw)
        if "//" in path:
            # Litestar would take several slashes for one, and so an empty id for no id.
            return _not_found()
        if "\ufffd" in path and b"%ef%bf%bd" not in raw.lower():
            # The server put a replacement character for what it could not decode, so that different ids look alike.
            return Reply.json(400, {"detail": "The path is not UTF-8"})
        return None

    def _authorized(self, scope: HTTPScope) -> bool:
        scheme, _, credentials = (_header(scope, b"authorization") or b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(credentials.strip(), self._token or b"")


def _redirect(scope: HTTPScope, path: str, raw: bytes) -> Reply:
    if "//" in path or not is_known_path(scope, path[:-1]):
        return _not_found()
    query = scope["query_string"]
    location = raw[:-1] + (b"?" + query if query else b"")
    return Reply(307, b"", ((b"location", location),))


def _not_found() -> Reply:
    return Reply.json(404, {"detail": "Not Found"})


def _header(scope: HTTPScope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None


def _cors_headers(origin: bytes) -> list[tuple[bytes, bytes]]:
    # A wildcard would forbid credentials, so the origin is named; it then decides what a cache may reuse.
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-credentials", b"true"),
        (b"access-control-expose-headers", _EXPOSED),
        (b"vary", b"Origin"),
    ]


def _preflight(scope: HTTPScope, origin: bytes | None) -> Reply:
    if origin is None:
        return Reply.json(400, {"detail": "This origin is not allowed"}, {"vary": "Origin"})
    headers = [
        *_cors_headers(origin),
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-max-age", _PREFLIGHT_SECONDS),
    ]
    requested = _header(scope, b"access-control-request-headers")
    if requested is not None:
        headers.append((b"access-control-allow-headers", requested))
    return Reply(200, b"", tuple(headers))


def _with_headers(send: Send, headers: list[tuple[bytes, bytes]]) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *headers]
        await send(message)

    return send_with_headers

"""What every request passes before it is routed: cross-origin rules, the token, and trailing slashes."""

from __future__ import annotations

import hmac
from collections.abc import Set as AbstractSet
from typing import Final, cast

from litestar.exceptions import MethodNotAllowedException, NotFoundException
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from lightning_api.errors import failure, problem_of, reply_to_error
from lightning_api.load import Load
from lightning_api.replies import Headers, Reply
from lightning_api.shortcuts import Shortcuts
from lightning_sql.errors import OverloadedError

__all__ = ["OVERLOADED", "UNGUARDED", "Edge", "is_authorized", "is_known_path"]

UNGUARDED: Final = frozenset({"/v1/agl/health", "/healthz", "/readyz"})
"""The paths that need no token."""

_HARMLESS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""
_CREDENTIALS: Final = (b"access-control-allow-credentials", b"true")
_EXPOSED: Final = (
    b"access-control-expose-headers",
    b"*, Allow, Content-Encoding, Location, Retry-After, WWW-Authenticate",
)
_VARY: Final = (b"vary", b"Origin")
OVERLOADED: Final = {"/v1/agl/": reply_to_error(OverloadedError()), "/v1/lightning/": problem_of(OverloadedError())}
"""How calls are refused before they cost anything, by how their paths begin; others are refused by their endpoints."""

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
        cors_origins: the origins whose pages may call, with credentials; `*` is any, without credentials, none
            turns CORS off.
        token: the bearer token to ask for, or None.
        load: what the process has taken on; when that is enough, calls are refused before they cost anything.
        unlimited: the paths that are served nonetheless.
        slashed: the paths that end with a slash.
    """

    def __init__(
        self,
        app: ASGIApp,
        shortcuts: Shortcuts,
        *,
        cors_origins: tuple[str, ...],
        token: str | None,
        load: Load,
        unlimited: AbstractSet[str],
        slashed: AbstractSet[str] = frozenset(),
    ) -> None:
        self._slashed = slashed
        self._app = app
        self._shortcuts = shortcuts
        self._cors = bool(cors_origins)
        self._any_origin = "*" in cors_origins
        self._origins = frozenset(origin.encode() for origin in cors_origins)
        self._token = None if token is None else token.encode()
        self._load = load
        self._unlimited = unlimited

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = cast(HTTPScope, scope)
        if self._cors and (origin := _header(request, b"origin")) is not None:
            allowed = self._allowed(origin)
            if request["method"] == "OPTIONS" and _header(request, b"access-control-request-method") is not None:
                await _preflight(request, allowed).send(send)
                return
            send = _with_headers(send, allowed or (_VARY,))
        reply = self._refusal(request)
        if reply is None:
            await (self._shortcuts.find(request) or self._app)(scope, receive, send)
        else:
            await reply.send(send)

    def _refusal(self, scope: HTTPScope) -> Reply | None:
        path = scope["path"]
        if self._token is None:
            if scope["method"] not in _HARMLESS and self._is_foreign(scope):
                return failure(path, 403, "Pages of other origins may not do this; --cors-origin allows an origin")
        elif path not in UNGUARDED and not is_authorized(scope, self._token):
            return failure(path, 401, "A valid bearer token is required", ((b"www-authenticate", b"Bearer"),))
        if path not in self._unlimited and self._load.is_full(path):
            for prefix, reply in OVERLOADED.items():
                if path.startswith(prefix):
                    return reply
        raw = scope["raw_path"].partition(b"?")[0]
        if b"%" in raw and b"%2f" in raw.lower():
            # An escaped slash belongs to an id, and no id in a path has any; unescaped, it would name another route.
            return _not_found(path)
        if path.endswith("/") and path != "/" and path not in self._slashed:
            return _redirect(scope, path, raw)
        if "//" in path:
            # Litestar would take several slashes for one, and so an empty id for no id.
            return _not_found(path)
        if "\ufffd" in path and b"%ef%bf%bd" not in raw.lower():
            # The server put a replacement character for what it could not decode, so that different ids look alike.
            return failure(path, 400, "The path is not UTF-8")
        return None

    def _allowed(self, origin: bytes) -> Headers:
        """What tells a browser that pages of an origin may call; nothing if they may not."""
        if origin in self._origins:
            return ((b"access-control-allow-origin", origin), _CREDENTIALS, _EXPOSED, _VARY)
        # Pages of anybody must not call with what the browser knows of its user.
        return ((b"access-control-allow-origin", b"*"), _EXPOSED, _VARY) if self._any_origin else ()

    def _is_foreign(self, scope: HTTPScope) -> bool:
        """Whether a page asks that is neither of this server nor of an origin that is allowed.

        A browser sends some requests for any page, and only keeps the answer from it.
        """
        origin = _header(scope, b"origin")
        if origin is None:
            return False
        own = _header(scope, b"host") or b""
        return not self._allowed(origin) and origin.partition(b"://")[2].lower() != own.lower()


def is_authorized(scope: HTTPScope, token: bytes) -> bool:
    """Whether a request carries the token, once and nothing beside it."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return False
    scheme, _, credentials = given[0].partition(b" ")
    return hmac.compare_digest(credentials.strip(), token) and scheme.lower() == b"bearer"


def _redirect(scope: HTTPScope, path: str, raw: bytes) -> Reply:
    if "//" in path or not is_known_path(scope, path[:-1]):
        return _not_found(path)
    query = scope["query_string"]
    location = raw[:-1] + (b"?" + query if query else b"")
    return Reply(307, b"", ((b"location", location),))


def _not_found(path: str) -> Reply:
    return failure(path, 404, "Not Found")


def _header(scope: HTTPScope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None


def _preflight(scope: HTTPScope, allowed: Headers) -> Reply:
    if not allowed:
        return Reply.json(400, {"detail": "This origin is not allowed"}, {"vary": "Origin"})
    headers = [
        *allowed,
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-max-age", _PREFLIGHT_SECONDS),
    ]
    requested = _header(scope, b"access-control-request-headers")
    if requested is not None:
        headers.append((b"access-control-allow-headers", requested))
    return Reply(200, b"", tuple(headers))


def _with_headers(send: Send, headers: Headers) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *headers]
        await send(message)

    return send_with_headers

"""Sessions of PostgreSQL whose other end may vanish without a word."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakSet

import asyncpg
from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["IdleSessions", "KeptAliveConnection", "Sessions"]

_IDLE_SECONDS: Final = 10
_INTERVAL_SECONDS: Final = 5
_PROBES: Final = 3
_UNACKNOWLEDGED_MILLISECONDS: Final = 20_000
_OPTIONS: Final = {
    # Not every system has each of them.
    "TCP_KEEPIDLE": _IDLE_SECONDS,
    "TCP_KEEPINTVL": _INTERVAL_SECONDS,
    "TCP_KEEPCNT": _PROBES,
    "TCP_USER_TIMEOUT": _UNACKNOWLEDGED_MILLISECONDS,
}


if TYPE_CHECKING:
    _Connection: TypeAlias = asyncpg.Connection[Any]
else:
    _Connection = asyncpg.Connection


class KeptAliveConnection(_Connection):
    """A connection that breaks when the machine at its other end is gone, whether or not anything is sent to it."""

    __slots__ = ()

    def __init__(self, protocol: Any, transport: Any, *parameters: Any) -> None:
        super().__init__(protocol, transport, *parameters)
        connection = transport.get_extra_info("socket")
        if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS.items():
            option = getattr(socket, name, None)
            if option is not None:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Sessions:
    """Every session that an engine has begun, so that none is left when the engine is done with.

    A caller who gives up while the engine greets a new session leaves it behind, in nobody's hands.
    """

    def __init__(self) -> None:
        self._drivers: WeakSet[KeptAliveConnection] = WeakSet()
        drivers = self._drivers

        class Noted(KeptAliveConnection):
            __slots__ = ()

            def __init__(self, protocol: Any, transport: Any, *parameters: Any) -> None:
                super().__init__(protocol, transport, *parameters)
                drivers.add(self)

        self.kind: type[KeptAliveConnection] = Noted
        """What the driver is to make for this engine."""

    async def end(self) -> None:
        """End those that are left."""
        left = [driver for driver in self._drivers if not driver.is_closed()]
        for driver in left:
            driver.terminate()
        if left:
            # Their sockets are closed in one of the next turns of the event loop, and there may be none after this.
            await asyncio.sleep(0)
            await asyncio.sleep(0)


class IdleSessions:
    """The sessions in an engine's pool, which are all broken when one of the engine's does not answer.

    Others may not either, and are not to be tried one by one, each until its time is up.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._drivers: set[Any] = set()
        event.listen(engine.sync_engine, "checkin", self._come)
        event.listen(engine.sync_engine, "checkout", self._go)
        event.listen(engine.sync_engine, "handle_error", self._fail)

    def _come(self, connection: Any, _record: object) -> None:
        if connection is not None:
            self._drivers.add(connection.driver_connection)

    def _go(self, connection: Any, _record: object, _proxy: object) -> None:
        self._drivers.discard(connection.driver_connection)

    def _fail(self, context: ExceptionContext) -> None:
        if isinstance(context.original_exception, TimeoutError):
            context.is_disconnect = True
            self.break_all()

    def break_all(self) -> None:
        """Break them, without a word to a server that may not listen."""
        while self._drivers:
            self._drivers.pop().terminate()

"""How the service is configured: by `LIGHTNING_SQL_*` variables, and flags that win over them."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Self

from lightning_sql.errors import ConfigurationError

__all__ = ["COMPRESS_MODES", "ENVIRONMENT_PREFIX", "LOG_LEVELS", "TRACKERS", "Settings", "is_loopback"]

ENVIRONMENT_PREFIX: Final = "LIGHTNING_SQL_"
LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
COMPRESS_MODES: Final = ("auto", "on", "off")
TRACKERS: Final = ("none", "prometheus", "console")

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off", ""})


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("must be true or false")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number") from None


def _list(text: str) -> tuple[str, ...]:
    return tuple(item for item in text.replace(",", " ").split() if item)


def _parsed_by(parse: Callable[[str], Any], default: Any) -> Any:
    return field(default=default, metadata={"parse": parse})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one server. Each is also an environment variable: `port` is `LIGHTNING_SQL_PORT`."""

    database_url: str = field(default="sqlite:///lightning.db", repr=False, metadata={"parse": str})
    """`sqlite:///file`, `postgresql://…` or `memory://`."""
    host: str = _parsed_by(str, "127.0.0.1")
    port: int = _parsed_by(_whole, 4747)
    """0 takes any free port."""
    workers: int = _parsed_by(_whole, 1)
    """Server processes."""
    partition: str = _parsed_by(str, "default")
    """Which of the isolated stores in the database this is."""
    scan_debounce_seconds: float = _parsed_by(_number, 10.0)
    """Least time between two watchdog scans, in seconds; 0 scans before every call."""
    claim_timeout_seconds: float | None = _parsed_by(float, None)
    """After how long an attempt of which nothing was heard since it was claimed is given up, and its rollout queued
    again whatever its retry settings; None is never."""
    database_wait_seconds: float = _parsed_by(float, 40.0)
    """How long a call waits for a database that is away before it is answered 503; a statement may take half of it."""
    cors_origins: tuple[str, ...] = _parsed_by(_list, ())
    """Origins whose pages may call; `*` is any. In the environment, separated by commas or spaces."""
    token: str | None = field(default=None, repr=False, metadata={"parse": str})
    """The bearer token that every call but health must carry; None asks for none."""
    log_level: str = _parsed_by(str.lower, "info")
    body_limit: int = _parsed_by(_whole, 64 * 1024 * 1024)
    """Largest request body, in bytes, also after decompression."""
    max_requests: int = _parsed_by(int, 2048)
    """How many calls a server process works on at once; it refuses more with 503. Waits and health do not count."""
    max_request_bytes: int = _parsed_by(int, 256 * 1024 * 1024)
    """How large the bodies of all calls in flight may be together, in bytes; twice the body limit at least."""
    compress: str = _parsed_by(str.lower, "auto")
    """Whether large answers are compressed where the caller takes gzip; `auto`: unless it is on this machine."""
    tracker: str = _parsed_by(str.lower, "none")
    """Who takes down metrics: `prometheus` serves them at /v1/prometheus/, `console` prints them."""
    allow_public: bool = _parsed_by(_flag, False)
    """Whether an address that others can reach may be served without a token."""

    @classmethod
    def load(cls, environment: Mapping[str, str], **given: Any) -> Self:
        """Settings from variables, and from what is given (None: not given), which wins.

        Raises:
            ConfigurationError: a value that is malformed or out of range.
        """
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        for setting in fields(cls):
            variable = ENVIRONMENT_PREFIX + setting.name.upper()
            if setting.name in values or variable not in environment:
                continue
            try:
                values[setting.name] = setting.metadata["parse"](environment[variable])
            except ValueError as error:
                # What it was set to may be a secret that belongs to another variable.
                raise ConfigurationError(f"{variable} {error}") from None
        return cls(**values).checked()

    def checked(self) -> Self:
        """These settings, if they make sense.

        Raises:
            ConfigurationError: one of them is out of range, or two contradict each other.
        """
        problems = {
            "the port must be between 0 and 65535": not 0 <= self.port <= 65535,
            "there must be at least one worker": self.workers < 1,
            "the scan debounce must be zero or more seconds": not 0 <= self.scan_debounce_seconds < float("inf"),
            "the wait for the database must be at least one second": not 1 <= self.database_wait_seconds < float("inf"),
            "the claim timeout must be more than zero seconds": self.claim_timeout_seconds is not None
            and not 0 < self.claim_timeout_seconds < float("inf"),
            "the body limit must be at least one byte": self.body_limit < 1,
            "at least one request must be allowed": self.max_requests < 1,
            "the bytes of all requests must be at least one": self.max_request_bytes < 1,
            "the partition must have a name": not self.partition,
            "the host must not be empty": not self.host,
            "the token must not be empty; leave it out to serve without one": self.token == "",
            "the token must be printable ASCII without spaces": self.token is not None and not _is_token(self.token),
            f"the log level must be one of {', '.join(LOG_LEVELS)}": self.log_level not in LOG_LEVELS,
            f"the tracker must be one of {', '.join(TRACKERS)}": self.tracker not in TRACKERS,
            "the console shows one process: use one worker, or --tracker prometheus": self.tracker == "console"
            and self.workers > 1,
            f"compress must be one of {', '.join(COMPRESS_MODES)}": self.compress not in COMPRESS_MODES,
        }
        for problem, found in problems.items():
            if found:
                raise ConfigurationError(problem)
        return self

    def checked_exposure(self) -> Self:
        """These settings, if serving them does not open the store to strangers by accident.

        Raises:
            ConfigurationError: an address that others can reach, without a token or `allow_public`.
        """
        if self.token is None and not self.allow_public and not is_loopback(self.host):
            raise ConfigurationError(
                f"{self.host} can be reached by others: set a token (LIGHTNING_SQL_TOKEN), or pass --allow-public"
            )
        return self

    def with_port(self, port: int) -> Self:
        """These settings on another port."""
        return replace(self, port=port)

    @property
    def logging_level(self) -> int:
        """The log level as `logging` counts it."""
        return logging.getLevelNamesMapping()[self.log_level.upper()]


def _is_token(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def is_loopback(host: str) -> bool:
    """Whether only this machine can be at the other end of an address."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return ((address.version == 6 and address.ipv4_mapped) or address).is_loopback

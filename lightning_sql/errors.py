"""Every error that lightning-sql raises on purpose.

Errors about a caller's arguments are also `ValueError`s, because that is what the protocol's
stores raise (CONTRACT.md section 11); errors about the service's surroundings are not.
"""

from __future__ import annotations

__all__ = [
    "ConfigurationError",
    "DatabaseFullError",
    "DatabaseUnavailableError",
    "DuplicatedPrimaryKeyError",
    "IdempotencyKeyReusedError",
    "InvalidRequestError",
    "LightningError",
    "OverloadedError",
    "RecordNotFoundError",
    "SchemaOutdatedError",
    "TransactionConflictError",
    "UnstorableValueError",
]


class LightningError(Exception):
    """Base of every error in this module; the docstring is the default message."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message if message is not None else (type(self).__doc__ or "").partition("\n")[0])


class InvalidRequestError(LightningError, ValueError):
    """The arguments of a call make no sense together.

    Raised for an unknown filter operator, an unorderable sort field, a page outside its bounds,
    a null where the protocol forbids one.
    """


class UnstorableValueError(InvalidRequestError):
    """A value does not fit the column that would hold it.

    Raised for a scalar integer beyond 64 bits, a NaN in a numeric column and an over-long key.
    """


class IdempotencyKeyReusedError(InvalidRequestError):
    """This idempotency key belongs to another call, which took place."""


class RecordNotFoundError(LightningError, ValueError):
    """A record that the call must change does not exist."""


class DuplicatedPrimaryKeyError(LightningError, ValueError):
    """An item with this primary key exists already, or stands twice in one call."""


class ConfigurationError(LightningError):
    """The configuration cannot work.

    Raised for a malformed database URL and for settings that contradict each other.
    """


class SchemaOutdatedError(ConfigurationError):
    """The database schema is not the one that this release needs; run `lightning-sql migrate up`."""


class DatabaseUnavailableError(LightningError):
    """The database cannot be reached, or is not ready to serve."""


class DatabaseFullError(DatabaseUnavailableError):
    """The database has no room left; nothing was done, and calls that need none still work.

    Raised when the disk is full or the database has reached a limit of its size. It is not tried again
    by itself: room is made from outside.
    """


class OverloadedError(DatabaseUnavailableError):
    """More calls wait for the database than the store lets wait; nothing was done, try again later."""


class TransactionConflictError(DatabaseUnavailableError):
    """A transaction kept losing against concurrent ones until its deadline passed."""

"""The storage types on which the dialects differ."""

from __future__ import annotations

from typing import Final

from sqlalchemy import JSON, BigInteger, Integer, Text

__all__ = ["AUTO_NUMBER", "BIG_INTEGER", "BYTEWISE_TEXT", "JSON_TEXT"]

BIG_INTEGER: Final = BigInteger
BYTEWISE_TEXT: Final = Text().with_variant(Text(collation="C"), "postgresql")
"""SQLite compares bytewise by itself."""
JSON_TEXT: Final = Text().with_variant(JSON(none_as_null=True), "postgresql")
"""`json`, not `jsonb`, keeps the text as it was written; the engine hands it through unparsed."""
AUTO_NUMBER: Final = BigInteger().with_variant(Integer, "sqlite")
"""A primary key that numbers itself: only a plain INTEGER does so on SQLite."""

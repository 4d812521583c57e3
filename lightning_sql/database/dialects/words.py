"""What may get into the text of a statement at run time."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["word"]

_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|-?[0-9]+")


def word(text: str) -> str:
    """A name or a number that cannot be bound, such as a table to be analysed, for the text of a statement.

    Raises:
        ValueError: it is more than one word, so it is neither.
    """
    if not _WORD.fullmatch(text):
        raise ValueError("not a word that can stand in a statement")
    return text

"""What an OTLP export may cost before it is read: a few bytes on the wire can become a lot of memory.

Gzip turns kilobytes into the largest body that is accepted, and protobuf turns two bytes of that, an empty
message, into more than a hundred bytes of objects. So the content of a gzip file is bounded while it is
unpacked, and the fields of a large message are counted before a parser makes objects of them.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, Final, TypeAlias

from google.protobuf.descriptor import Descriptor
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lightning_api.errors import BodyTooLargeError

__all__ = ["FIELDS", "MalformedExportError", "check_fields", "decompress"]

FIELDS: Final = 2_000_000
"""The most fields, at all levels, that an export may have."""

_CONTENT_BYTES: Final = 1024 * 1024
_INPUT_BYTES: Final = 64 * 1024
_MEMBERS: Final = 1000
"""The most files that one gzip body may join: each costs as much as kilobytes of content."""
_SMALLEST_FIELD_BYTES: Final = 2
_GZIP_FORMAT: Final = zlib.MAX_WBITS | 16
_ZEROS: Final = re.compile(rb"\x00*")

_Table: TypeAlias = dict[int, Any]
"""The fields of a message that are messages: their numbers, and the tables of these."""


class MalformedExportError(Exception):
    """An export request cannot be read; the message says why, in one line."""


def decompress(body: bytes, limit: int) -> bytes:
    """The content of a gzip file of any number of members up to a thousand.

    Args:
        body: the file.
        limit: the largest content, in bytes.

    Raises:
        MalformedExportError: it is no complete gzip file, or has too many members.
        BodyTooLargeError: the content is larger.
    """
    chunks: list[bytes] = []
    size = position = members = 0
    while position < len(body):
        members += 1
        if members > _MEMBERS:
            raise MalformedExportError(f"the body joins more than {_MEMBERS} gzip files")
        member = zlib.decompressobj(wbits=_GZIP_FORMAT)
        while not member.eof:
            # What zlib does not use of its input is copied, so it gets little at a time.
            piece = body[position : position + _INPUT_BYTES]
            try:
                chunk = member.decompress(piece, _CONTENT_BYTES)
            except zlib.error:
                raise MalformedExportError("the body is not valid gzip") from None
            position += len(piece) - len(member.unconsumed_tail) - len(member.unused_data)
            size += len(chunk)
            if size > limit:
                raise BodyTooLargeError
            chunks.append(chunk)
            if not chunk and not piece and not member.eof:
                raise MalformedExportError("the body is truncated gzip")
        # Padding with zeros between and after members is part of the format's practice.
        padding = _ZEROS.match(body, position)
        position = position if padding is None else padding.end()
    return b"".join(chunks)


def _table(descriptor: Descriptor, known: dict[str, _Table]) -> _Table:
    if descriptor.full_name not in known:
        table: _Table = {}
        known[descriptor.full_name] = table
        for field in descriptor.fields:
            if field.message_type is not None:
                table[field.number] = _table(field.message_type, known)
    return known[descriptor.full_name]


_EXPORT: Final = _table(ExportTraceServiceRequest.DESCRIPTOR, {})


def check_fields(body: bytes, most: int = FIELDS) -> None:
    """Refuse an export of too many fields, looking at a body only if it is large enough to hold so many.

    Raises:
        MalformedExportError: it is no protobuf.
        BodyTooLargeError: it has more than `most` fields.
    """
    if len(body) <= most * _SMALLEST_FIELD_BYTES:
        return
    try:
        _count_fields(body, most)
    except (IndexError, _NoProtobufError):
        # Whatever is not understood here must not reach the parser uncounted.
        raise MalformedExportError("the body is not an ExportTraceServiceRequest") from None


class _NoProtobufError(Exception):
    """A message does not end where it should, or has a field of a kind that no export has."""


def _count_fields(body: bytes, most: int) -> None:
    pending: list[tuple[int, int, _Table]] = [(0, len(body), _EXPORT)]
    count = 0
    while pending:
        position, end, table = pending.pop()
        while position < end:
            count += 1
            if count > most:
                raise BodyTooLargeError
            tag, position = _varint(body, position)
            match tag & 7:
                case 0:
                    _, position = _varint(body, position)
                case 1:
                    position += 8
                case 2:
                    length, position = _varint(body, position)
                    inner = table.get(tag >> 3)
                    if inner is not None and length:
                        pending.append((position, position + length, inner))
                    position += length
                case 5:
                    position += 4
                case _:
                    raise _NoProtobufError
        if position != end:
            raise _NoProtobufError


def _varint(body: bytes, position: int) -> tuple[int, int]:
    value = body[position]
    if value < 0x80:
        return value, position + 1
    value &= 0x7F
    for shift in range(7, 70, 7):
        position += 1
        byte = body[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
    raise _NoProtobufError

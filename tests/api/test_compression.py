"""Which answers are compressed, for whom, and that nothing of them is lost."""

import asyncio
import gzip
import json
from typing import Any

import pytest

from lightning_api.compression import COMPRESS_BYTES, Compressor, gzip_allowed
from tests.api.fakes import PagesOfSpans, StoreOfRows, span_row

PATH = "/v1/agl/rollouts"
FAR = ("192.0.2.7", 4000)
GZIP = {"accept-encoding": "gzip, deflate"}


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("gzip", True),
        ("GZIP", True),
        ("x-gzip", True),
        ("gzip, deflate, br", True),
        ("deflate;q=1.0, gzip;q=0.5", True),
        ("*", True),
        ("*;q=0.1", True),
        ("gzip;q=0.5, *;q=0", True),
        ("gzip ; q=0.001", True),
        ("", False),
        ("identity", False),
        ("deflate", False),
        ("gzip;q=0", False),
        ("gzip;q=0.000", False),
        ("gzip;q=0, *", False),
        ("*;q=0", False),
        ("gzip;q=none", False),
        ("notgzip", False),
        ("identity, gzip;q=0.5", False),
        ("identity;q=0.5, gzip;q=0.5", True),
    ],
)
def test_negotiation(header: str, allowed: bool) -> None:
    assert gzip_allowed(header.encode()) is allowed


async def start_large(client: Any, size: int = 2 * COMPRESS_BYTES, headers: dict[str, str] = GZIP) -> Any:
    return await client.post(PATH, json={"input": "ab" * (size // 2)}, headers=headers)


@pytest.mark.parametrize(
    ("mode", "peer", "compressed"),
    [
        ("auto", FAR, True),
        ("auto", ("2001:db8::1", 1), True),
        ("auto", ("127.0.0.1", 1), False),
        ("auto", ("127.9.9.9", 1), False),
        ("auto", ("::1", 1), False),
        ("auto", ("::ffff:127.0.0.1", 1), False),
        ("auto", ("service", 1), False),  # the address that the server itself is called by
        ("auto", None, False),  # a UNIX socket
        ("auto", ("", 1), False),
        ("on", FAR, True),
        ("on", ("127.0.0.1", 1), True),
        ("on", None, True),
        ("off", FAR, False),
    ],
)
async def test_modes_and_peers(serve: Any, mode: str, peer: Any, compressed: bool) -> None:
    client = await serve(compress=mode, peer=peer)
    answer = await start_large(client)
    assert answer.status_code == 201
    assert answer.headers.get("content-encoding") == ("gzip" if compressed else None)
    assert answer.headers.get("vary") == (None if mode == "off" else "Accept-Encoding")
    assert answer.json()["input"] == "ab" * COMPRESS_BYTES
    assert (int(answer.headers["content-length"]) < COMPRESS_BYTES) is compressed


async def test_only_large_answers_are_compressed(serve: Any) -> None:
    client = await serve(compress="on")
    small = await start_large(client, COMPRESS_BYTES // 2)
    assert "content-encoding" not in small.headers
    assert "vary" not in small.headers
    frame = len(small.content) - COMPRESS_BYTES // 2
    # An answer holds times, which have more or fewer digits.
    for more, compressed in ((-50, False), (50, True)):
        answer = await start_large(client, COMPRESS_BYTES - frame + more)
        assert ("content-encoding" in answer.headers) is (len(answer.content) >= COMPRESS_BYTES) is compressed


@pytest.mark.parametrize("accepted", ["", "identity", "gzip;q=0", "br"])
async def test_those_who_take_no_gzip_get_none(serve: Any, accepted: str) -> None:
    client = await serve(compress="on")
    answer = await start_large(client, headers={"accept-encoding": accepted})
    assert "content-encoding" not in answer.headers
    assert answer.headers["vary"] == "Accept-Encoding"
    assert int(answer.headers["content-length"]) == len(answer.content)


async def test_several_headers_count_as_one(serve: Any) -> None:
    client = await serve(compress="on")
    answer = await client.post(
        PATH, json={"input": "x" * 100_000}, headers=[("accept-encoding", "br"), ("accept-encoding", "gzip")]
    )
    assert answer.headers["content-encoding"] == "gzip"


async def test_origins_and_encodings_both_vary(serve: Any) -> None:
    client = await serve(compress="on", cors_origins=("https://a.example",))
    answer = await start_large(client, headers=GZIP | {"origin": "https://a.example"})
    assert set(answer.headers.get_list("vary")) == {"Accept-Encoding", "Origin"}


async def test_streams_are_compressed_as_they_come(serve: Any) -> None:
    chunks = [[span_row(number, name="x" * 1000) for number in range(start, start + 100)] for start in (0, 100, 200)]
    client = await serve(store=StoreOfRows(PagesOfSpans(chunks)), compress="on")
    answer = await client.get("/v1/agl/spans?rollout_id=r", headers=GZIP)
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["vary"] == "Accept-Encoding"
    assert "content-length" not in answer.headers
    assert [span["sequence_id"] for span in answer.json()["items"]] == list(range(300))
    raw = b"".join([part async for part in (await stream_of(client)).aiter_raw()])
    assert len(raw) < 50_000
    assert json.loads(gzip.decompress(raw)) == answer.json()


async def stream_of(client: Any) -> Any:
    request = client.build_request("GET", "/v1/agl/spans?rollout_id=r", headers=GZIP)
    return await client.send(request, stream=True)


async def test_large_parts_leave_the_event_loop_free() -> None:
    compressor = Compressor()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    part = json.dumps([{"number": number} for number in range(200_000)]).encode()
    packed = await compressor.add(part)
    counting.cancel()
    assert turns > 1
    packed += await compressor.add(b"small") + compressor.end()
    assert gzip.decompress(packed) == part + b"small"


async def test_what_is_compressed_already_stays_as_it_is(serve: Any) -> None:
    client = await serve(compress="on")
    answer = await client.post(
        "/v1/traces", content=b"", headers={"content-type": "application/x-protobuf", "accept-encoding": "gzip"}
    )
    assert answer.headers.get_list("content-encoding") == ["gzip"]
    assert answer.content == b""

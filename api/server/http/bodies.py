"""Bodies of requests, read within limits of size and time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator

from aiohttp import web

from api.server.http.problems import HTTPProblem

JSON = "application/json"
BINARY = "application/octet-stream"
PIECE = 2**20  # bytes that are read or written at once


async def read_body(
    request: web.Request,
    limit: int,
    seconds: float,
    *,
    media_type: str = JSON,
    encodings: Collection[str] = (),
) -> bytes:
    """Return the request's body, decompressed where it has one of ``encodings``.

    Raises an HTTPProblem: 413 past ``limit`` bytes, 408 when it does not arrive within ``seconds``,
    415 when it is not ``media_type``, 400 when it is incomplete.
    """
    check_media_type(request, media_type, encodings)
    body = bytearray()
    length = request.content_length or 0
    with transfer_problems(f"The body did not arrive within {seconds:.0f} s."):
        async with asyncio.timeout(seconds):
            while length <= limit and (part := await request.content.readany()):
                body += part
                length = max(length, len(body))
    if length > limit:
        raise too_large(limit)
    return bytes(body)


def too_large(limit: int) -> HTTPProblem:
    """Return the problem of a body of more than ``limit`` bytes."""
    fix = f"send at most {limit} bytes"
    return HTTPProblem(
        413, f"The body is larger than {limit} bytes.", kind="too-large", field="body", fix=fix
    )


def check_media_type(
    request: web.Request, media_type: str, encodings: Collection[str] = ()
) -> None:
    """Raise an HTTPProblem (415) when the body is not ``media_type``, or is compressed otherwise
    than by one of ``encodings``."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if request.content_type != media_type or encoding not in ("identity", *encodings):
        content_type = request.headers.get("Content-Type", "")
        fix = f"send the header 'Content-Type: {media_type}', and no Content-Encoding"
        raise HTTPProblem(
            415,
            "The body is of another media type.",
            kind="media-type",
            field="body",
            value=content_type,
            fix=fix,
        )


@contextlib.contextmanager
def transfer_problems(too_slow: str) -> Iterator[None]:
    """Turn a TimeoutError (its problem has the detail ``too_slow``) and an incomplete body into
    HTTPProblems."""
    try:
        yield
    except TimeoutError:
        headers = {"Connection": "close"}
        raise HTTPProblem(
            408, too_slow, kind="slow-body", fix="send it faster", headers=headers
        ) from None
    except (web.RequestPayloadError, ConnectionError) as error:
        detail = f"The body cannot be read ({type(error).__name__})."
        raise HTTPProblem(400, detail, kind="broken-body", fix="send all of it") from None


def refuse_many_values(body: bytes, most: int) -> None:
    """Raise an HTTPProblem (413) for JSON that takes long to parse.

    Commas, colons and brackets inside of texts are counted, too.
    """
    count = body.count
    for occurrences, limit, kind in (
        (count(b","), most, "values"),
        (count(b"{") + count(b"["), most // 10, "tables and lists"),
        (count(b":"), most // 10, "keys"),
    ):
        if occurrences > limit:
            detail = f"The body holds {occurrences} {kind}; at most {limit} are read."
            fix = "send it in parts, or as bytes where that can be"
            raise HTTPProblem(413, detail, kind="too-large", field="body", fix=fix)

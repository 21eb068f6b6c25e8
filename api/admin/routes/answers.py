"""JSON answers for the pages' scripts, compressed if they are large enough."""

import gzip
from typing import Any

import orjson
from fastapi import Request
from starlette.responses import Response

MIN_PACKED = 1024  # bytes; compressing less than a packet gains nothing
LEVEL = 4  # of gzip; numbers compress to a fifth at 60 MB/s


def json_answer(request: Request, value: Any) -> Response:
    body = orjson.dumps(value)
    headers = {"Content-Type": "application/json", "Vary": "Accept-Encoding"}
    if len(body) >= MIN_PACKED and "gzip" in request.headers.get("accept-encoding", ""):
        body = gzip.compress(body, LEVEL, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(body, headers=headers)

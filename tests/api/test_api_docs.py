"""docs/api.md names every route, every error code and every request field, and no other code."""

import re
from pathlib import Path

from fastapi import FastAPI

from api.errors import ROUTE_CODES, TABLE, UNEXPECTED
from api.shapes.schemas import ChatBody, CompletionBody, Extension

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
NOT_TOLD = {"cachesvc", "stream_options"}


def test_the_error_table_is_the_code() -> None:
    told = set(re.findall(r"^\| (\d{3}) \| `(\w+)` \|", PAGE, re.MULTILINE))
    rows = {(str(row.status), row.code) for row in [*TABLE.values(), UNEXPECTED]}
    routes = {(str(status), code) for status, code in ROUTE_CODES.items()}
    assert rows | routes == told


async def test_every_route_is_documented(app: FastAPI) -> None:
    paths = set(app.openapi()["paths"])
    told = {path for _, path in re.findall(r"^\| `(GET|POST) (/\S+)` \|", PAGE, re.MULTILINE)}
    assert paths == told


def test_every_field_is_documented() -> None:
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields} - NOT_TOLD
    missing = {name for name in fields if f"`{name}`" not in PAGE and f"`{name}:" not in PAGE}
    assert not missing
    assert all(f"`{name}:" in PAGE for name in Extension.model_fields)

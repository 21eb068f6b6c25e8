"""Routes of other servers are refused by name, with what to do instead."""

import re
from pathlib import Path

import httpx
import pytest

from api.routes.unserved import UNSERVED

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("base", ["/v1", ""])
@pytest.mark.parametrize("name", UNSERVED)
async def test_each_is_refused_by_name(client: httpx.AsyncClient, name: str, base: str) -> None:
    for method, path in (("POST", name), ("GET", f"{name}/some-id"), ("DELETE", f"{name}/a/b")):
        answer = await client.request(method, f"{base}/{path}")
        assert 404 == answer.status_code
        assert (
            f"/v1/{name} is not served here: {UNSERVED[name]}. This server has "
            "/v1/chat/completions, /v1/responses, /v1/messages and /v1/completions, with 'bytes'."
        ) == answer.json()["error"]["message"]


async def test_they_do_not_hide_what_is_served(client: httpx.AsyncClient) -> None:
    assert 200 == (await client.get("/v1/models")).status_code
    answer = await client.get("/v1/models/files")
    assert "files" in answer.text
    assert "is not served here; served: 'bytes'" in answer.text


def test_the_first_page_names_them() -> None:
    said = re.search(r"It serves no ([^.]*)\(", README.read_text(encoding="utf-8"))
    assert said is not None
    for name in ("embeddings", "audio", "images", "files", "batches", "moderations", "reranking"):
        assert name in said[1]

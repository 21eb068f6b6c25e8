"""/account: a page that shows customers the data of `/v1/usage*`.

The page is the same for everybody. The visitor types in a key, which stays in the page, and the
page reads those routes with it.
"""

from importlib import resources
from typing import Literal

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter(include_in_schema=False)


@router.get("/account")
async def account_page() -> Response:
    """The page, which asks for a key."""
    return _asset("account.html", "text/html")


@router.get("/account/{name}")
async def account_asset(name: Literal["account.js", "account.css"]) -> Response:
    return _asset(name, "text/css" if name.endswith("css") else "text/javascript")


def _asset(name: str, media_type: str) -> Response:
    text = (resources.files("api.routes") / "account_page" / name).read_text("utf-8")
    return Response(text, media_type=media_type, headers={"Cache-Control": "no-cache"})

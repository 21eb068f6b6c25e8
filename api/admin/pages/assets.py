"""Static files of the pages: our own, and two libraries from the packages that ship them.

htmx (0BSD) and uPlot (MIT) come with the installed packages `django-js-lib-htmx` and `youplot`,
neither of which is imported. Their digests are fixed here, so no other file is ever served in their
place. Every file is read and compressed once and addressed by its digest, so browsers can cache it.
"""

import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

OWN: Final = Path(__file__).parent / "static"
PREFIX: Final = "/admin/static"
KEEP: Final = "public, max-age=31536000, immutable"
TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Vendored(NamedTuple):
    """A file of an installed package and its expected SHA-256."""

    package: str
    path: str
    digest: str


VENDORED: Final[Mapping[str, Vendored]] = {
    "htmx.js": Vendored(
        "js_lib_htmx",
        "static/htmx/htmx.min.js",
        "491955cd1810747d7d7b9ccb936400afb760e06d25d53e4572b64b6563b2784e",
    ),
    "uplot.js": Vendored(
        "youplot",
        "vendor/uplot.iife.min.js",
        "2d27e8ad3d228164525ce213f9dc716f39b4e3aee0cc773fb3491c96cf4921a2",
    ),
    "uplot.css": Vendored(
        "youplot",
        "vendor/uplot.min.css",
        "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    ),
}


class AssetMissing(Exception):
    """A file of an installed package is missing or has another digest."""


class Asset(NamedTuple):
    """One file as it is sent."""

    body: bytes
    packed: bytes
    digest: str


router = APIRouter(prefix=PREFIX, include_in_schema=False)


@cache
def assets() -> Mapping[str, Asset]:
    """All files by name. Read at first use."""
    found = {path.name: path.read_bytes() for path in sorted(OWN.iterdir())}
    found |= {name: _vendored(each) for name, each in VENDORED.items()}
    return {
        name: Asset(body, gzip.compress(body, 9, mtime=0), hashlib.sha256(body).hexdigest())
        for name, body in found.items()
    }


def url(name: str) -> str:
    """The URL of a file, for templates. Raises KeyError for an unknown name."""
    return f"{PREFIX}/{name}?v={assets()[name].digest[:12]}"


@router.get("/{name}")
async def asset(request: Request, name: str) -> Response:
    """Needs no login: the login page uses these files, and they reveal nothing about the server."""
    found = assets().get(name)
    if found is None:
        raise HTTPException(404, "Not Found")
    headers = {"Cache-Control": KEEP, "Vary": "Accept-Encoding"}
    headers["Content-Type"] = TYPES[Path(name).suffix]
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.packed, headers=headers | {"Content-Encoding": "gzip"})
    return Response(found.body, headers=headers)


def _vendored(wanted: Vendored) -> bytes:
    """The file's bytes, without importing the package. Raises AssetMissing."""
    spec = find_spec(wanted.package)
    places = spec.submodule_search_locations if spec is not None else None
    try:
        body = (Path(next(iter(places or ()))) / wanted.path).read_bytes()
    except (StopIteration, OSError):
        raise AssetMissing(
            f"the package {wanted.package} lacks {wanted.path}; install again with `make setup`"
        ) from None
    if hashlib.sha256(body).hexdigest() != wanted.digest:
        raise AssetMissing(
            f"{wanted.path} of the package {wanted.package} is not the file that was reviewed; "
            "install the pinned version with `make setup`"
        )
    return body

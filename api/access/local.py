"""Lets only web pages of this machine use a server that needs no keys.

Such a server trusts everyone who reaches it. Any web page can reach it through its visitor's
browser, with a cross-origin request or under a name that it has pointed at this machine (DNS
rebinding). With such a name it can read the answers too. Programs send no Origin and name an
address or localhost. Event loop only.
"""

import ipaddress
from collections.abc import Collection
from functools import lru_cache
from urllib.parse import urlsplit

from fastapi import Request

from api.errors import ForeignPage


def check_local(request: Request, origins: Collection[str]) -> None:
    """Raises ForeignPage for a request from a page of another site, unless `origins` name it; `*`
    names none."""
    host, origin = request.headers.get("host"), request.headers.get("origin", "")
    if host is not None and not _is_address(_name_in(f"//{host}")):
        raise _refusal(f"was sent to {host[:80]!r}")
    of_web = origin == "null" or origin.lower().startswith(("http:", "https:"))
    if of_web and origin not in origins and not _is_loopback(_name_in(origin)):
        raise _refusal(f"comes from a page of {origin[:80]!r}")


@lru_cache(16)  # clients use few
def _name_in(url: str) -> str:
    """The host in a URL; empty if the URL cannot be parsed."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


@lru_cache(16)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return _is_loopback(name)
    return True


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _refusal(what: str) -> ForeignPage:
    return ForeignPage(
        "This server needs no API key, and therefore answers only what is asked on its own "
        f"machine; this request {what}. Ask 127.0.0.1 or localhost, or have the operator make a "
        "key with `cachesvc keys create`."
    )

"""Authorisation of the admin routes, as FastAPI dependencies.

`reader` allows reading, `admin` allows changes. Three credentials are accepted: a session cookie
(with its CSRF token on every request but GET), `Authorization: Bearer KEY` with a key that has the
scope `admin` or `read`, and the operator's token, which the running server stores for the command
line on its machine. A browser never sends a bearer token by itself, so it needs no CSRF token.
"""

import asyncio
import hmac
from collections.abc import Iterator
from typing import Annotated

from fastapi import Depends, Request

from api.access.auth import bearer_token, require
from api.admin.login.sessions import Admin, LoginSession, Role
from api.admin.parts import books_of, found, parts_of
from api.context import request_log_of
from api.errors import CsrfFailed, InvalidRequest, LoginNeeded, MissingScope
from api.headers import FIT_NAME, single_header
from billing.keys import Principal, Scope
from billing.operations.books import OpenBooks

CSRF_HEADER = "X-CSRF-Token"
CSRF_FIELD = "csrf_token"  # in a form submitted without a script
ACTOR_HEADER = "X-Cachesvc-Actor"  # whom the operator's token acts for: the audit log's name
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


async def reader(request: Request) -> Admin:
    """The caller.

    Raises LoginNeeded, CsrfFailed, UnknownKey and related errors for a bad key, and InvalidRequest
    for a NUL in the address, which PostgreSQL cannot search for.
    """
    if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
        raise InvalidRequest("The address has a NUL (%00), which no name here has; leave it out.")
    token = bearer_token(single_header(request, "Authorization"))
    found = await _by_bearer(request, token) if token else await _by_cookie(request)
    request_log_of(request).add(admin=found.name)
    request.state.admin = found
    return found


MayRead = Annotated[Admin, Depends(reader)]


async def admin(asking: MayRead) -> Admin:
    """The caller, who may make changes. Raises MissingScope for a reader."""
    if asking.role is not Role.ADMIN:
        raise MissingScope(
            f"{asking.name} may look but not change anything; log in with a key that has the scope "
            "'admin'."
        )
    return asking


MayChange = Annotated[Admin, Depends(admin)]


def _books(request: Request, _: MayRead) -> Iterator[OpenBooks]:
    with found():
        yield books_of(request)


Books = Annotated[OpenBooks, Depends(_books)]  # for readers; a missing record is a 404


def cookie_name(request: Request) -> str:
    """The name of this server's session cookie.

    Browsers share cookies between all ports of a host, so the name is this port's own. Over https
    it begins with `__Host-`, which binds the cookie to this host.
    """
    port = request.url.port or (443 if is_secure(request) else 80)
    return f"{'__Host-' if is_secure(request) else ''}cachesvc_admin_{port}"


def is_secure(request: Request) -> bool:
    return request.url.scheme == "https"


def session_of(request: Request) -> LoginSession | None:
    token = request.cookies.get(cookie_name(request))
    return parts_of(request).sessions.find(token) if token else None


async def _by_bearer(request: Request, token: str) -> Admin:
    parts = parts_of(request)
    if hmac.compare_digest(token.encode(), parts.operator_token.encode()):
        actor = request.headers.get(ACTOR_HEADER, "")
        return Admin(actor if FIT_NAME.fullmatch(actor) else "operator")
    return admin_of(await asyncio.to_thread(parts.keys.authenticate, token))


def admin_of(principal: Principal) -> Admin:
    """The operator whose key this is, by the key's name and its id, which nobody else has.

    Raises MissingScope.
    """
    require(principal, Scope.READ)
    name, key_id = principal.key_name, principal.key_id
    role = Role.ADMIN if principal.may(Scope.ADMIN) else Role.READER
    return Admin(f"{name} ({key_id})" if name else key_id, role, key_id)


async def _by_cookie(request: Request) -> Admin:
    session = session_of(request)
    if session is None or not await _may_stay(request, session):
        raise LoginNeeded(
            "Log in at /admin/login, or send 'Authorization: Bearer KEY' with a key that has the "
            "scope 'admin' or 'read'."
        )
    if request.method not in SAFE_METHODS:
        await check_csrf(request, session.csrf_token)
    return session.admin


async def _may_stay(request: Request, session: LoginSession) -> bool:
    """Whether the key that opened the session is still valid; if not, ends it."""
    parts, key_id = parts_of(request), session.admin.key_id
    if not key_id or await asyncio.to_thread(parts.keys.is_live, key_id):
        return True
    parts.sessions.close(request.cookies.get(cookie_name(request), ""))
    return False


async def check_csrf(request: Request, expected: str) -> None:
    """Raises CsrfFailed unless the header or the form carries the token."""
    given = request.headers.get(CSRF_HEADER)
    if given is None and is_form(request):
        field = (await request.form()).get(CSRF_FIELD)
        given = field if isinstance(field, str) else None
    if not hmac.compare_digest((given or "").encode(), expected.encode()):
        raise CsrfFailed(
            f"The request lacks its CSRF token ({CSRF_HEADER}, or the form field {CSRF_FIELD}): "
            "load the page again and retry. Nothing was changed."
        )


def is_form(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0]
    return kind in ("application/x-www-form-urlencoded", "multipart/form-data")

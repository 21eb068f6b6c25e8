"""Logging in and out: the login page, one-time links, logging out.

There is no session yet, so a login form proves that it is ours by a nonce in a cookie and its HMAC
in the form. Attempts are limited by address and in total, before the key is looked at. Every login,
failed login and logout leaves an audit entry.
"""

import asyncio
import re
import secrets
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Form, Request
from starlette.responses import RedirectResponse, Response

from api.admin.access import MayChange, MayRead, admin_of, cookie_name, is_secure, session_of
from api.admin.login.sessions import Admin, Role
from api.admin.pages.base import render
from api.admin.parts import add_audit_entry, parts_of
from api.errors import MissingScope
from billing.errors import BillingError

router = APIRouter(prefix="/admin", include_in_schema=False)

LINK_TTL_S = 15 * 60.0
WRONG = "That is no key that opens the dashboard. Copy it whole, and try again."
ENDED = (
    "Your session has ended: it was too old, you were away too long, its key was revoked, or the "
    "server was restarted. Log in."
)
# Where a login may lead: our own pages.
_NEXT = re.compile(r"/admin(/[A-Za-z0-9_./-]*)?(\?[A-Za-z0-9_.=&%+,~-]*)?")


@router.get("/login")
async def login_page(request: Request, token: str = "", next: str = "/admin") -> Response:  # noqa: A002  the name in the URL
    """The form; with a one-time link's `token`, logs in."""
    if token:
        found = parts_of(request).sessions.use_link(token)
        if found is not None:
            return await _enter(request, found, "link", render(request, "entered.html", None))
        return _form(request, next, "That link was used or is too old. Log in, or make another.")
    known = session_of(request) is not None or cookie_name(request) not in request.cookies
    return _form(request, next, "" if known else ENDED)


@router.post("/login")
async def log_in(
    request: Request,
    key: Annotated[str, Form()],
    proof: Annotated[str, Form()] = "",
    next: Annotated[str, Form()] = "/admin",  # noqa: A002
) -> Response:
    parts = parts_of(request)
    parts.login_forms.check(request.cookies.get(_nonce_cookie(request), ""), proof)
    await parts.login_limits.attempt(_address(request))
    try:
        found = admin_of(await asyncio.to_thread(parts.keys.authenticate, key.strip()))
    except (BillingError, MissingScope):
        await _audit(request, "admin.login_failed", "?", _address(request))
        answer = _form(request, next, WRONG)
        answer.status_code = 401
        return answer
    target = next if _NEXT.fullmatch(next) else "/admin"
    return await _enter(request, found, "key", RedirectResponse(target, 303))


@router.post("/logout")
async def log_out(request: Request, found: MayRead) -> Response:
    token = request.cookies.get(cookie_name(request), "")
    parts_of(request).sessions.close(token)
    await _audit(request, "admin.logout", found.name, found.name)
    answer = RedirectResponse("/admin/login", 303)
    answer.delete_cookie(cookie_name(request), **_flags(request))
    return answer


@router.post("/api/links")
async def make_link(request: Request, found: MayChange, role: Role = Role.ADMIN) -> dict[str, Any]:
    """A one-time login link, for someone who has no key at hand."""
    token = parts_of(request).sessions.make_link(replace(found, role=role), LINK_TTL_S)
    await _audit(request, "admin.link", found.name, found.name, role=role)
    return {"path": f"/admin/login?token={token}", "ttl_s": LINK_TTL_S}


async def _enter(request: Request, found: Admin, how: str, answer: Response) -> Response:
    """Opens a new session. Any session the browser had ends, which prevents session fixation."""
    sessions, cookie = parts_of(request).sessions, cookie_name(request)
    sessions.close(request.cookies.get(cookie, ""))
    await _audit(request, "admin.login", found.name, found.name, how=how, role=found.role)
    token, _ = sessions.open(found)
    answer.set_cookie(cookie, token, max_age=int(sessions.lifetime_s), **_flags(request))
    return answer


def _form(request: Request, target: str, message: str = "") -> Response:
    nonce = request.cookies.get(_nonce_cookie(request)) or secrets.token_urlsafe(32)
    answer = render(
        request,
        "login.html",
        None,
        proof=parts_of(request).login_forms.proof(nonce),
        next=target if _NEXT.fullmatch(target) else "/admin",
        message=message,
    )
    answer.set_cookie(_nonce_cookie(request), nonce, **_flags(request))
    return answer


def _flags(request: Request) -> dict[str, Any]:
    """Of every cookie: for this server alone, and no script's."""
    secure = is_secure(request)
    path = "/" if secure else "/admin"  # `__Host-` requires the path /
    return {"path": path, "secure": secure, "httponly": True, "samesite": "strict"}


def _nonce_cookie(request: Request) -> str:
    return f"{cookie_name(request)}_form"


def _address(request: Request) -> str:
    return request.client.host if request.client is not None else "unknown"


async def _audit(request: Request, action: str, subject: str, by: str, **after: Any) -> None:
    facts = {"address": _address(request)} | after
    await add_audit_entry(request, by, action, subject, after=facts)

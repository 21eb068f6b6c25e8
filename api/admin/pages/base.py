"""How a page is made: the templates, their common values, and the entries of the menu.

An area declares its page in `PAGES` and calls `render`. Templates escape everything. They contain
no script or style, which the content security policy would block.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, quote, urlsplit

from fastapi import Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from api.admin.access import session_of
from api.admin.login.sessions import Admin, Role
from api.admin.pages import assets
from api.admin.pages.format import FILTERS
from api.errors import ErrorAnswer
from billing.usage import TOKEN_CLASSES

THEMES: Final = ("light", "dark")
THEME_COOKIE: Final = "cachesvc_theme"


@dataclass(frozen=True, slots=True)
class Page:
    """An entry of the menu. `key` follows `g` on the keyboard."""

    path: str
    title: str
    key: str


PAGES: Final = (
    Page("/admin", "Overview", "o"),
    Page("/admin/cache", "Cache", "c"),
    Page("/admin/explorer", "Prefixes", "x"),
    Page("/admin/requests", "Requests", "r"),
    Page("/admin/money", "Money", "m"),
    Page("/admin/tenants", "Tenants", "n"),
    Page("/admin/keys", "Keys", "k"),
    Page("/admin/audit", "Audit log", "a"),
)

_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.globals["asset"] = assets.url
_templates.globals["hit_tokens"] = "+".join(
    f"traffic.prompt_tokens.{each.tier}" for each in TOKEN_CLASSES if each.tier
)
_templates.filters.update(FILTERS)


def render(request: Request, template: str, admin: Admin | None, **values: Any) -> HTMLResponse:
    """A page for the admin who is logged in, if one is."""
    session = session_of(request) if admin is not None else None
    theme = request.cookies.get(THEME_COOKIE, "")
    return HTMLResponse(
        _templates.get_template(template).render(
            admin=admin,
            may_change=admin is not None and admin.role is Role.ADMIN,
            csrf_token=session.csrf_token if session is not None else "",
            pages=PAGES,
            path=request.url.path,
            theme=theme if theme in THEMES else "",
            **values,
        )
    )


def refusal_page(request: Request, answer: ErrorAnswer) -> Response | None:
    """A refusal as a page for a browser; None if a program asked.

    A visitor who is not logged in is sent to the login page and returns after it.
    """
    if not request.url.path.startswith("/admin"):
        return None
    needs_login = answer.code == "login_needed"
    if request.headers.get("hx-request") and needs_login:
        shown = urlsplit(request.headers.get("hx-current-url", "/admin"))
        return Response(status_code=answer.status, headers={"HX-Redirect": _login_for(shown)})
    if "text/html" not in request.headers.get("accept", ""):
        return None
    if needs_login and request.method == "GET":
        target = _login_for(urlsplit(str(request.url)))
        return Response(status_code=303, headers={"Location": target})
    page = render(request, "refusal.html", None, answer=answer)
    page.status_code = answer.status
    page.headers.update(answer.headers)
    return page


def _login_for(page: SplitResult) -> str:
    """The login page's URL that leads back to `page` with its query."""
    back = page.path + (f"?{page.query}" if page.query else "")
    return f"/admin/login?next={quote(back)}"

"""Security headers of our pages: browsers run only our files and show the page in no frame."""

import base64
import hashlib
from typing import Final

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Final = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    # Not no-referrer, which would make browsers send `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


def with_style(page: str) -> dict[str, str]:
    """The headers of a self-contained page: only its own `<style>` is allowed."""
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    rest = "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; {rest}"
    return {"Content-Security-Policy": policy}

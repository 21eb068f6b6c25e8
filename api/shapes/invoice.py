"""An invoice as an answer: JSON, CSV, a page to print, or PDF. For admins and customers alike."""

from typing import Any

from starlette.responses import JSONResponse, Response

from api.page_headers import with_style
from billing.invoices.render import MEDIA_TYPES, Form


def invoice_answer(made: dict[str, Any] | bytes, form: Form, name: str) -> Response:
    """A page brings its own style; what is saved has a name."""
    if isinstance(made, dict):
        return JSONResponse(made)
    headers = dict(with_style(made.decode())) if form is Form.HTML else {}
    if form in (Form.PDF, Form.CSV):
        headers["content-disposition"] = f'inline; filename="{name}.{form}"'
    return Response(made, media_type=MEDIA_TYPES[form], headers=headers)

"""An invoice as a response: JSON, CSV, a printable page or PDF. For admins and customers."""

from typing import Any

from starlette.responses import JSONResponse, Response

from api.page_headers import with_style
from billing.invoices.render import MEDIA_TYPES, Form


def invoice_answer(made: dict[str, Any] | bytes, form: Form, name: str) -> Response:
    """The response. A page carries its own style; a download has a file name."""
    if isinstance(made, dict):
        return JSONResponse(made)
    headers = dict(with_style(made.decode())) if form is Form.HTML else {}
    if form in (Form.PDF, Form.CSV):
        headers["content-disposition"] = f'inline; filename="{name}.{form}"'
    return Response(made, media_type=MEDIA_TYPES[form], headers=headers)

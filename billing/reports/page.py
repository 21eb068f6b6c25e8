"""Pages to print, from the templates of this package. Any thread."""

from functools import cache
from typing import TYPE_CHECKING, Any

from billing.money import grouped
from billing.names import shown_model

if TYPE_CHECKING:
    from jinja2 import Environment


def page(template: str, **values: Any) -> str:
    """The HTML of a template in `billing/templates`; what is not markup is escaped."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, select_autoescape  # slow to import for commands

    environment = Environment(
        loader=PackageLoader("billing"),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["grouped"] = grouped
    environment.filters["shown_model"] = shown_model
    return environment

"""Messages as a chat template reads them: calls in the form that its style expects."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from api.tools.choice import Tool
from api.tools.style import Style
from api.tools.teaching import taught


def for_template(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], template: str | None, style: Style
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages and the tools to render."""
    as_text = style is Style.DEEPSEEK and "tojson" not in (template or "")
    plain = [_called(message, as_text=as_text) for message in messages]
    if style is Style.HARMONY:
        plain = [_thinking(message) for message in plain]
    if style is Style.TAUGHT:
        return taught(plain, tools), None
    return plain, [tool.for_template() for tool in tools] or None


def _called(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """A message with its calls' arguments as objects, which templates render as JSON.

    `as_text` keeps them as text, for templates that do not.
    """
    plain = dict(message)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_call(call, as_text=as_text) for call in plain["tool_calls"]]
    return plain


def _call(call: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and not as_text:
        arguments = _read(arguments)
    elif arguments is None:
        arguments = "{}" if as_text else {}
    return {**call, "function": {**function, "arguments": arguments}}


def _read(arguments: str) -> Any:
    try:
        read = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Renames reasoning as harmony's templates expect."""
    thought = message.pop("reasoning_content", None)
    return {**message, "thinking": thought} if thought else message

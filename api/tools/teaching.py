"""Tools for a model whose template has none: explained in the system prompt in Hermes' style.

Calls and results of earlier turns become text, which any template can render.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from api.tools.choice import Tool
from api.tools.hermes import CLOSE, OPEN

_HEAD = """\
You may call functions to help with the user's request. The functions, one JSON object a line:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as a JSON object between these marks:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


def taught(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The messages with `tools` in the leading system message, and all calls as text."""
    listed = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    head = _HEAD.format(tools=listed)
    plain = [_plain(message) for message in messages]
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{head}".strip()}
        return _merged([first, *plain[1:]]) if tools else _merged(plain)
    return _merged([{"role": "system", "content": head}, *plain] if tools else plain)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        return {"role": "user", "content": text, "result": True}
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = "\n".join(map(_written, message.get("tool_calls") or ()))
    if calls:
        plain["content"] = f"{message.get('content') or ''}\n{calls}".strip()
    return plain


def _written(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    plain = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"{OPEN}\n{json.dumps(plain, ensure_ascii=False)}\n{CLOSE}"


def _merged(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges consecutive results, and the user's text after them, into one message.

    Templates expect roles to alternate.
    """
    merged: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message.pop("result", False)
        if after_result and message["role"] == "user":
            merged[-1]["content"] += "\n" + message["content"]
        else:
            merged.append(message)
        after_result = is_result or (after_result and message["role"] == "user")
    return merged

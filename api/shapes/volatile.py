"""Drops volatile lines from the head of a system prompt.

Some clients put a line there that changes with every request, which makes the whole prompt miss. A
named rule drops it, and the answer's details name the rule.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from api.shapes.message import SYSTEM_ROLES

RULES: Final[Mapping[str, re.Pattern[str]]] = {
    # Claude Code sends its version and a digest of the conversation for its own billing.
    "claude-code-billing": re.compile(r"x-anthropic-billing-header:[^\n]*\n*"),
}


def without_volatile(
    messages: Sequence[Mapping[str, Any]], rules: Collection[str]
) -> tuple[list[Mapping[str, Any]], tuple[str, ...]]:
    """The messages, and the `rules` that dropped a line from the head of the first one."""
    plain = list(messages)
    head = plain[0] if plain else {}
    if head.get("role") not in SYSTEM_ROLES or not isinstance(head["content"], str):
        return plain, ()
    text, applied = plain[0]["content"], []
    for name in rules:
        if found := RULES[name].match(text):
            text = text[found.end() :]
            applied.append(name)
    if applied:
        plain[0] = {**plain[0], "content": text}
    return plain, tuple(applied)

"""Every field of every protocol, and what is done with it, from the tables that the code uses.

Used by `tests.reference`, which writes docs/fields.md, and by the test that compares the
providers' own lists with it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from api.shapes.body import Body
from api.shapes.fields import (
    CHAT,
    COMPLETIONS,
    GENERATION,
    IGNORED_CHAT,
    IGNORED_GENERATION,
    IGNORED_MESSAGES,
    IGNORED_RESPONSES,
    MESSAGES,
    RESPONSES,
    Unserved,
)
from api.shapes.messages import MessagesBody
from api.shapes.responses import ResponsesBody
from api.shapes.schemas import ChatBody, CompletionBody


class Handling(StrEnum):
    """What the server does with a field of a client's protocol."""

    HONOURED = "honoured"
    REFUSED = "refused"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class Protocol:
    """One route's body: the fields it declares, those it refuses, and those it ignores."""

    name: str
    path: str
    body: type[Body]
    refused: Mapping[str, Unserved]
    ignored: Mapping[str, str]

    def fields(self) -> Iterator[tuple[str, Handling, str]]:
        """Each known field by name, with what is done and why."""
        names = {*self.body.model_fields, *self.refused, *self.ignored}
        for name in sorted(names):
            if name in self.refused:
                yield name, Handling.REFUSED, self.refused[name].advice
            elif name in self.ignored:
                yield name, Handling.IGNORED, self.ignored[name]
            else:
                yield name, Handling.HONOURED, ""


PROTOCOLS: Final = (
    Protocol(
        "Chat completions (OpenAI, DeepSeek, Qwen)",
        "/v1/chat/completions",
        ChatBody,
        {**GENERATION, **CHAT},
        IGNORED_CHAT,
    ),
    Protocol(
        "Completions (OpenAI)",
        "/v1/completions",
        CompletionBody,
        {**GENERATION, **COMPLETIONS},
        IGNORED_GENERATION,
    ),
    Protocol("Responses (OpenAI)", "/v1/responses", ResponsesBody, RESPONSES, IGNORED_RESPONSES),
    Protocol("Messages (Anthropic)", "/v1/messages", MessagesBody, MESSAGES, IGNORED_MESSAGES),
)

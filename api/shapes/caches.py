"""Caches that clients keep by name: the bodies of `/v1/caches`, and a cache as JSON."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from api.errors import InvalidRequest
from api.headers import FIT_NAME
from api.job import Asked, Bill, Kept, Served
from api.shapes.answer import WireFormat
from api.shapes.body import Body, Items
from api.shapes.message import FunctionTool
from api.shapes.schemas import ChatBody, CompletionBody, Extension, Messages
from api.shapes.usage import closing

MIN_TTL_S, MAX_TTL_S = 60, 7 * 86_400
DEFAULT_TTL_S = 3600
_TTL = re.compile(r"([0-9]{1,9})(s|m|h|d)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def _seconds(ttl: object) -> object:
    """A ttl as seconds: 300, "300s", "5m", "1h", "2d"."""
    if not isinstance(ttl, str):
        return ttl
    if (found := _TTL.fullmatch(ttl)) is None:
        raise ValueError('should be seconds, or a text such as "5m", "2h" or "7d"')
    return int(found[1]) * _UNITS[found[2]]


Ttl = Annotated[int, BeforeValidator(_seconds), Field(ge=MIN_TTL_S, le=MAX_TTL_S)]


class NewCache(Body):
    """A prefix to cache: `messages` as in a chat, or `prompt`."""

    model: str
    name: str | None = None
    ttl: Ttl = DEFAULT_TTL_S
    messages: Messages | None = None
    prompt: str | list[int] | None = None
    tools: Items[FunctionTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cachesvc: Extension | None = None

    def checked_name(self) -> str | None:
        """The name, if one is given. Raises InvalidRequest for a name that a path cannot
        contain."""
        if self.name is not None and not FIT_NAME.fullmatch(self.name):
            raise InvalidRequest(
                "name must be up to 128 letters, digits and . _ : @ -", param="name"
            )
        return self.name

    def request(self) -> ChatBody | CompletionBody:
        """The request that computes the prefix. Raises InvalidRequest."""
        if (self.messages is None) == (self.prompt is None):
            raise InvalidRequest(
                "Give either messages (a chat) or prompt (a text or token ids).", param="messages"
            )
        if self.cachesvc is not None and (self.cachesvc.share or self.cachesvc.cache is False):
            raise InvalidRequest(
                "A cache is the tenant's own; leave out cachesvc.share and cachesvc.cache.",
                param="cachesvc",
            )
        if self.messages is None:
            return CompletionBody(
                model=self.model, cachesvc=self.cachesvc, prompt=self.prompt or "", max_tokens=0
            )
        return ChatBody(
            model=self.model,
            cachesvc=self.cachesvc,
            messages=self.messages,
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=False,
        )


class CacheChange(Body):
    ttl: Ttl


def cache_document(kept: Kept, model: str | None) -> dict[str, Any]:
    """A cache as JSON. `model` is None if it is no longer served."""
    pin = kept.pin
    return {
        "id": kept.name,
        "object": "cache",
        "kind": str(pin.kind),
        "model": model,
        "num_tokens": pin.num_tokens,
        "num_blocks": len(pin.keys),
        "created_at": int(pin.since_s),
        "expires_at": int(kept.expires_s),
    }


class CacheFormat(WireFormat):
    """A new cache, with the usage of computing it. It has no text."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def body(self, served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
        return self._document | closing(served, bill, asked)

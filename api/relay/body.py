"""The body that goes up to an endpoint: the client's, but for what is the server's or the tenant's.

The model's name becomes the endpoint's. Names by which the endpoint would know the tenant's users
become digests, salted by tenant, so that two tenants cannot meet in one. What the endpoint would
keep for the account, which all tenants share, is refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import orjson
import xxhash
from pydantic import ConfigDict, Field

from api.errors import Unsupported
from api.relay.protocol import ClientProtocol
from api.served_model import Endpoint
from api.shapes.schemas import LabelledBody, StreamOptions, check_choices
from engine.bounds import MAX_COUNT

TEMPLATE_TOKENS: Final = 1024  # that a template may add to a prompt beside what the body has
VERSION: Final = "2023-06-01"  # of Anthropic's protocol
_HEADER_VALUE = re.compile(r"[A-Za-z0-9._,\- ]{1,256}")
_PROTOCOL_HEADERS = ("anthropic-version", "anthropic-beta")  # they say what a body means
_CACHE_NAMES = ("prompt_cache_key", "prompt_cache_isolation_key")
_USER_NAMES = ("user", "user_id", "safety_identifier", *_CACHE_NAMES)
_SHARED = "what the endpoint keeps is shared by all tenants. Send the whole conversation."
_UNPRICED = "it may cost what is not this model's price."
_INSIDE = "it is for who runs the endpoint."
_REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("previous_response_id", "conversation", "background", "container"), _SHARED),
    **dict.fromkeys(("prompt", "preset", "cachesvc", "deferred"), _SHARED),  # the last is xAI's
    # Of gateways. The last has whatever else goes up from there, with the model among it.
    **dict.fromkeys(("models", "fallbacks", "route", "provider", "extra_body"), _UNPRICED),
    **dict.fromkeys(("speed", "inference_geo"), _UNPRICED),  # Anthropic's
    **dict.fromkeys(("api_base", "base_url", "api_key", "user_config"), _INSIDE),  # LiteLLM's
    **dict.fromkeys(("extra_headers", "organization", "custom_llm_provider"), _INSIDE),
    **dict.fromkeys(("kv_transfer_params", "priority", "request_id"), _INSIDE),  # vLLM's
    **dict.fromkeys(("chat_template", "id_slot", "lora"), _INSIDE),  # of vLLM, and llama-server's
    **dict.fromkeys(("bootstrap_host", "bootstrap_room", "rid", "lora_path"), _INSIDE),  # SGLang's
    "custom_logit_processor": _INSIDE,
    "tools": "an advisor is another model, with another price.",
}
# By which the endpoint reads more than the body has.
_SEARCHES = ("search_parameters", "enable_search")  # xAI's and Qwen's
_READERS = ("mcp_servers", "plugins", "web_search_options", "data_sources", *_SEARCHES)
_SUMMARIES = ("context_management", "compaction")  # of the conversation, by a call of its own
MOST_CALLS: Final = 100  # of a model in one answer
_OWN_TOOLS = ("function", "custom", None)
# Parts whose tokens have nothing to do with their bytes.
_MEDIA = re.compile(
    rb'"(?:[a-z_]*image[a-z_]*|[a-z_]*(?:audio|video)_?(?:url|data)?|input_(?:audio|file)'
    rb'|file_(?:id|url|data)|prompt_embeds|cached_content)":[\["{]'
    rb'|"type":"[a-z_]*(?:image|audio|video|file|document|upload)[a-z_]*"'
)
# What the endpoint keeps, by its id. Lists of ids beside the messages, where a tool may say so too.
_ID = (
    rb'"(file_id|container|container_id|cached_content)":"(?:file|cntr|container|cachedContents)[-_/]'
    rb'|"type":"(item_reference)"'
)
_IN_MESSAGES, _BESIDE = re.compile(_ID), re.compile(_ID + rb'|"(file_ids|vector_store_ids)":\["')

Tokens = Annotated[int, Field(ge=1, le=MAX_COUNT)]


class PassedBody(LabelledBody):
    """What the server needs to know of a body that passes."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    n_cmpl: Annotated[int, Field(ge=1)] | None = None  # llama-server's name for `n`
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    max_output_tokens: Tokens | None = None
    prompt: Any = None

    @property
    def num_prompts(self) -> int:
        """A list of texts or of lists has several; a list of token ids is one."""
        several = isinstance(self.prompt, list) and not all(type(i) is int for i in self.prompt)
        return len(self.prompt) if several else 1

    @property
    def num_choices(self) -> int:
        return self.num_prompts * max(self.n or 1, self.best_of or 1, self.n_cmpl or 1)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def max_output(self, context: int, limits: Sequence[str]) -> int:
        """The tokens at most of one choice, by the fields that its protocol has for them."""
        given = (getattr(self, name) for name in limits)
        return min(max((each for each in given if each), default=context), context)

    def check(self, max_choices: int) -> None:
        """Raises InvalidRequest or Unsupported, by field."""
        check_choices(self.num_choices, max_choices)
        kept = self.prompt if isinstance(self.prompt, Mapping) else None  # of Responses
        extra = self.model_extra or {}
        asks = any(str(kind).startswith("advisor_") for kind in _kinds_of(extra.get("tools")))
        given = {**extra, "prompt": kept, "tools": asks}
        kept_part = _BESIDE.search(orjson.dumps({**extra, "messages": None}))
        kept_part = kept_part or _IN_MESSAGES.search(orjson.dumps(extra.get("messages")))
        name = kept_part[kept_part.lastindex or 0].decode() if kept_part else ""
        if name := next(filter(given.get, _REFUSED), name):
            raise Unsupported(
                f"{name} is not served with this model, whose requests pass to an endpoint: "
                f"{_REFUSED.get(name, _SHARED)} Leave it out.",
                param=name,
            )


def _kinds_of(tools: object) -> list[object]:
    offered = tools if isinstance(tools, list) else []
    return [each.get("type") for each in offered if isinstance(each, Mapping)]


def labels_of(document: Mapping[str, Any], protocol: ClientProtocol) -> Mapping[str, Any]:
    """The body as `PassedBody` reads it. Anthropic's user stands in its metadata."""
    metadata = document.get("metadata")
    if protocol.is_messages and isinstance(metadata, Mapping):
        return {**document, "user": metadata.get("user_id"), "metadata": None}
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class Ascent:
    """A body that goes up. `salt` is the tenant's."""

    protocol: ClientProtocol
    document: Mapping[str, Any]
    endpoint: Endpoint
    salt: bytes
    headers: Mapping[str, str]  # of the protocol, from the client's

    def encoded(self, service_tier: str) -> bytes:
        """The bytes to send. A service tier goes up only if our price is that of the tier."""
        body = {**self.document, "model": self.endpoint.model}
        for name in _USER_NAMES:
            if isinstance(body.get(name), str):
                body[name] = self._digest(name, body[name])
        metadata = body.pop("metadata", None)
        if self.protocol.is_messages and isinstance(metadata, Mapping) and metadata.get("user_id"):
            body["metadata"] = {"user_id": self._digest("user_id", str(metadata["user_id"]))}
        given = body.pop("cache_salt", None)
        if self.protocol.path in self.endpoint.salted or given:
            body["cache_salt"] = self._digest("cache_salt", str(given or ""))
        if service_tier:
            body["service_tier"] = service_tier
        else:
            body.pop("service_tier", None)
        if self.protocol.keeps_answers or body.get("store"):
            body["store"] = False
        if body.get("stream") and self.protocol.asks_for_usage:
            options = body.get("stream_options") or {}
            body["stream_options"] = {**options, "include_usage": True}
        return orjson.dumps(body)

    def all_headers(self) -> dict[str, str]:
        """The protocol's, beside those that the client of the endpoint sends with each request."""
        if self.protocol.is_messages:
            ours = {"anthropic-version": VERSION, **self.headers}
            return ours | ({"x-api-key": self.endpoint.key} if self.endpoint.key else {})
        return {}

    def most_tokens(self, context: int, num_prompts: int) -> int:
        """Tokens that the prompts have at most: a token has a byte or more, and a template adds
        some. Images and what the endpoint's own tools read may be as long as the context."""
        data = orjson.dumps(self.document)
        if self._reads or _MEDIA.search(data):
            return context * num_prompts
        return min(len(data) + TEMPLATE_TOKENS * num_prompts, context * num_prompts)

    def most_of_calls(self, context: int) -> int:
        """Tokens at most if the endpoint may ask the model several times, and counts each prompt;
        else 0."""
        several = self._reads or any(self.document.get(name) for name in _SUMMARIES)
        return MOST_CALLS * context if several else 0

    @property
    def _reads(self) -> bool:
        """Whether the endpoint has tools of its own to read with."""
        own = any(kind not in _OWN_TOOLS for kind in _kinds_of(self.document.get("tools")))
        return own or any(self.document.get(name) for name in _READERS)

    def _digest(self, name: str, value: str) -> str:
        return xxhash.xxh3_128_hexdigest(b"\0".join((self.salt, name.encode(), value.encode())))


def protocol_headers(given: Mapping[str, str]) -> dict[str, str]:
    """The client's headers that are a part of what it asks. No other goes up."""
    return {
        name: value
        for name in _PROTOCOL_HEADERS
        if (value := given.get(name)) and _HEADER_VALUE.fullmatch(value)
    }

"""Request bodies as OpenAI documents them, checked strictly, and their sampling parameters.

Unknown fields are ignored. Wrong types and values out of range are refused with the field's name. A
known field that would change the answer and is not served is refused, never silently dropped.
"""

import hashlib
from collections.abc import Mapping
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from api.errors import InvalidRequest, Unsupported
from api.shapes.body import MESSAGES_MAX, Body, Items
from api.shapes.fields import CHAT, COMPLETIONS, GENERATION, Unserved, check_fields
from api.shapes.message import (
    SYSTEM_ROLES,
    TTL_S,
    WRITES_MOST,
    Breakpoint,
    CacheControl,
    CacheOptions,
    FunctionTool,
    Message,
    marked_points,
)
from engine.bounds import (
    MAX_COUNT,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MIN_REPETITION_PENALTY,
    MIN_SEED,
)
from engine.request import SamplingParams
from tiers.blocks.contents import Content

TOP_LOGPROBS_MAX = 20  # OpenAI's bound for chat; served for completions too
STOP_STRINGS_MAX = 16
STOP_CHARS_MAX = 512  # of one stop string; searching takes time in its length at each token
BIASES_MAX = 10_000
IDS_MAX = 1 << 20  # token ids in a body

_SAMPLING = (  # fields that a body and the engine's parameters share
    *("n", "temperature", "top_p", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)

Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Salt = Annotated[str, Field(max_length=1_024)]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]


class StreamOptions(Body):
    model_config = ConfigDict(extra="allow")  # named as ignored

    include_usage: bool | None = None


class JsonSchemaFormat(Body):
    name: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None  # always strict: nothing outside the schema is generated


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


MAX_PAUSE_S = 3600  # a session keeps its blocks no longer; a cache can
_REMOVED = {  # from the vendor block, with what to use instead
    "contents": "no placeholder of an image or a sound is read here; send it to an engine at a URL "
    "that reads it",
    "require_hit": "POST /v1/cache/quote says what a request would hit before it is sent",
    "max_price": "POST /v1/cache/quote says what a request may cost; hard limits of a tenant, a "
    "key or a tag bound what is spent",
}


class Extension(Body):
    """The vendor block of a request, under the key `cachesvc`."""

    model_config = ConfigDict(extra="forbid")  # a mistyped share would be another scope

    details: bool | None = None  # timings, miss reasons and cost in the answer
    receipt: bool | None = None  # a signed receipt in the answer
    cache: bool | None = None  # False: neither read nor written
    share: str | None = None  # name of a sharing group that the tenant belongs to
    pause_s: Annotated[float, Field(ge=0, le=MAX_PAUSE_S)] | None = None  # of the session; 0 ends
    publish: bool | None = None  # answer once the prompt's blocks are in the shared tier

    @model_validator(mode="before")
    @classmethod
    def _has_what_is_served(cls, given: object) -> object:
        for name in given if isinstance(given, dict) else ():
            if name in _REMOVED:
                raise ValueError(f"{name} is not served: {_REMOVED[name]}")
        return given


class LabelledBody(Body):
    """The fields by which a client labels a request for its bill."""

    user: str | None = None
    user_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9\-_]{1,512}$")] | None = None
    safety_identifier: str | None = None
    metadata: Any = None
    service_tier: str | None = None


def check_choices(num: int, most: int) -> None:
    if num > most:
        raise InvalidRequest(
            f"{num} choices (prompts times n) are more than the {most} that this server answers in "
            "one request.",
            param="n",
        )


class GenerationBody(LabelledBody):
    """The fields common to chat and completions. None means the default."""

    model_config = ConfigDict(extra="allow")  # kept, so that some can be refused by name

    unserved: ClassVar[Mapping[str, Unserved]] = {}

    model: str
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    min_tokens: Count | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[Annotated[int, Field(ge=0)]] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None
    ) = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: Salt | None = None
    cachesvc: Extension | None = None

    @field_validator("stop")
    @classmethod
    def _stop_is_served(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > STOP_STRINGS_MAX:
            raise ValueError(f"at most {STOP_STRINGS_MAX} stop strings are served")
        if "" in strings:
            raise ValueError("a stop string must not be empty")
        if any(len(text) > STOP_CHARS_MAX for text in strings):
            raise ValueError(f"a stop string may have {STOP_CHARS_MAX} characters")
        return stop

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias_is_short(cls, bias: object) -> object:
        if isinstance(bias, dict) and len(bias) > BIASES_MAX:
            raise ValueError(f"at most {BIASES_MAX} tokens may have a bias")
        return bias

    @field_validator("logit_bias")
    @classmethod
    def _bias_names_tokens(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token in bias or {}:
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise ValueError("keys must be token ids in decimal digits; /tokenize gives them")
        return bias

    def check(self, max_choices: int) -> list[str]:
        """The names of fields that this server does not know or ignores on purpose.

        Raises Unsupported for fields that would change the answer, and InvalidRequest for more
        choices than one request may have.
        """
        check_choices(self.num_prompts * (self.n or 1), max_choices)
        return check_fields(self, GENERATION, self.unserved)

    def sampling(self, max_tokens: int) -> SamplingParams:
        """The engine's parameters. Stop strings are not among them: the detokenizer finds them."""
        given = {name: getattr(self, name) for name in _SAMPLING}
        given |= {
            "top_k": None if self.top_k is None else max(self.top_k, 0),  # -1 and 0 both mean all
            "logprobs": self.logprobs_asked,
            "prompt_logprobs": self.prompt_logprobs_asked,
        }
        return SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            **{name: value for name, value in given.items() if value is not None},
        )

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def logprobs_asked(self) -> int | None:
        return None

    @property
    def prompt_logprobs_asked(self) -> int | None:
        return None

    @property
    def apart(self) -> tuple[Content, ...]:
        """What keeps the request's blocks apart from others of its tenant, as a content of each
        prompt's first token; empty: nothing. So they stay the tenant's, for purges and quotas."""
        hasher = hashlib.blake2b(digest_size=32)
        given = {"cache_salt": self.cache_salt, "user_id": self.user_id}
        for text in (part for each in given.items() if each[1] for part in each):
            data = (text or "").encode()
            hasher.update(len(data).to_bytes(4, "little") + data)
        return (Content(0, 1, hasher.digest()),) if any(given.values()) else ()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def extension(self) -> Extension:
        return self.cachesvc or Extension()

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(GenerationBody):
    unserved = CHAT

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: CacheOptions | None = None
    cache_control: CacheControl | None = None  # of the whole prompt, in OpenRouter's form
    enable_thinking: bool | None = None  # Qwen's name for `thinking`

    def check(self, max_choices: int) -> list[str]:
        several = ("prompt_cache_options", "prompt_cache_retention", "cache_control")
        given = [name for name in several if getattr(self, name) is not None]
        ignored = super().check(max_choices)
        if len(given) > 1:
            raise InvalidRequest(
                f"{given[0]} and {given[1]} both say how long: send one.", param=given[0]
            )
        return ignored

    def breakpoints(self) -> list[Breakpoint]:
        """The points up to which to keep the prompt: the latest four, the whole prompt included.

        Of the conversation, without those that one of a later turn covers.
        """
        options = self.prompt_cache_options or CacheOptions()
        first = takewhile(lambda each: each.role in SYSTEM_ROLES, self.messages)
        num_system = len(list(first))
        found = list(marked_points(self.messages, self.tools or (), num_system, options))
        if self.cache_control is not None:
            found.append(Breakpoint(self.cache_control.for_s, len(self.messages)))
        elif self.prompt_cache_retention == "24h":
            found.append(Breakpoint(TTL_S["24h"], len(self.messages)))
        elif self.prompt_cache_options and options.mode != "explicit":
            found.append(Breakpoint(options.for_s, len(self.messages)))
        if len(found) < 2:
            return found
        needed = [
            point
            for number, point in enumerate(found)
            if point.messages <= num_system or not any(map(point.ends_before, found[number:]))
        ]
        return needed[-WRITES_MOST:]

    def until(self, point: Breakpoint) -> "ChatBody | None":
        """The chat cut at a breakpoint; None if that is its end."""
        if not point.messages:  # after the tools of a chat without a system message
            return self._of([Message(role="user", content="")])
        *before, last = self.messages[: point.messages]
        parts = last.content if isinstance(last.content, list) else []
        num_parts = point.parts or len(parts)
        if point.messages == len(self.messages) and num_parts == len(parts):
            return None
        cut = last
        if parts:  # calls come after the text
            calls = None if point.parts else last.tool_calls
            cut = last.model_copy(update={"content": parts[:num_parts], "tool_calls": calls})
        messages = [*before, cut]
        if all(each.role in SYSTEM_ROLES for each in messages):
            messages.append(Message(role="user", content=""))  # templates need one
        return self._of(messages)

    def _of(self, messages: list[Message]) -> "ChatBody":
        return self.model_copy(update={"messages": messages, "continue_final_message": None})

    @property
    def logprobs_asked(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequest(
                    'top_logprobs needs logprobs: set "logprobs": true.', param="top_logprobs"
                )
            return None
        return self.top_logprobs or 0


class CompletionBody(GenerationBody):
    unserved = COMPLETIONS

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    max_tokens: Count | None = None  # 0 computes only the prompt
    echo: bool | None = None
    best_of: int | None = None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompt_is_texts_or_ids(cls, prompt: object) -> object:
        """Replaces pydantic's check, which would try each of the four shapes on every item."""
        if isinstance(prompt, list) and len(prompt) > IDS_MAX:
            raise ValueError(f"should have at most {IDS_MAX} items")
        if not (isinstance(prompt, str) or _is_list_of(prompt, str) or _is_ids(prompt)):
            several = isinstance(prompt, list) and all(map(_is_ids, prompt))
            if not several:
                raise ValueError("should be a text, a list of texts, token ids, or a list of such")
        return prompt

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids. Raises InvalidRequest for an empty one."""
        prompt = self.prompt
        if isinstance(prompt, str):
            several: list[str | list[int]] = [prompt]
        elif prompt and isinstance(prompt[0], int):
            several = [prompt]
        else:
            several = list(prompt)  # type: ignore[arg-type]
        if not several or not all(several):
            raise InvalidRequest(
                "prompt is empty; give at least one character or token id.", param="prompt"
            )
        return several

    @property
    def num_prompts(self) -> int:
        return len(self.prompts())

    @property
    def logprobs_asked(self) -> int | None:
        return self.logprobs

    def check(self, max_choices: int) -> list[str]:
        ignored = super().check(max_choices)
        if self.echo and self.logprobs is not None and self.stream:
            raise Unsupported(
                "logprobs of an echoed prompt are not served in streams; leave out echo, logprobs "
                "or stream.",
                param="logprobs",
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise Unsupported(
                "best_of other than n is not served; ask for n choices and pick one.",
                param="best_of",
            )
        return ignored

    @property
    def prompt_logprobs_asked(self) -> int | None:
        return self.logprobs if self.echo else None


class QuoteBody(Body):
    """The fields that identify the kind of a body."""

    messages: list[Any] | None = None


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {kind}


def _is_ids(value: object) -> bool:
    return _is_list_of(value, int)

"""The request bodies as OpenAI documents them, checked strictly, and their sampling parameters.

Unknown fields are ignored, wrong types and values out of range are refused with the field's name.
Known fields that would change the answer and are not served are refused, never dropped silently.

The body is a stranger's and is checked on the event loop, so no list is looked through further than
its bound or its first wrong item: pydantic's report on eight million of them took two minutes.
"""

import gc
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from api.errors import InvalidRequest, NotJson, Unsupported
from api.shapes.images import ImageAsked
from api.shapes.unserved import CHAT, COMPLETIONS, GENERATION, Unserved, refuse_unserved
from engine.bounds import (
    MAX_COUNT,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MIN_REPETITION_PENALTY,
    MIN_SEED,
)
from engine.request import SamplingParams

TOP_LOGPROBS_MAX = 20  # OpenAI's bound for chat; served for completions too
STOP_STRINGS_MAX = 16
STOP_CHARS_MAX = 512  # of one stop string; looking for it takes time in its length, each token
MESSAGES_MAX = 10_000
ITEMS_MAX = 1_024  # of tools, calls, parts, contents, token ids that stop
BIASES_MAX = 10_000
IDS_MAX = 1 << 20  # token ids in a body

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(max_length=ITEMS_MAX, fail_fast=True)]
Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class Body(BaseModel):
    """Strict types, unknown fields accepted."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None


class JsonSchemaFormat(Body):
    name: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None  # generated as if True: nothing that the schema does not name


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ContentSpan(Body):
    """Tokens of a prompt that stand for an image, a sound or other content."""

    start: Annotated[int, Field(ge=0, lt=1 << 31)]
    length: Annotated[int, Field(ge=1, lt=1 << 31)]
    digest: Annotated[str, Field(pattern=r"^([0-9a-fA-F]{2}){1,64}$")]
    kind: Literal["exact", "perceptual"] = "exact"
    prompt: Annotated[int, Field(ge=0)] = 0  # which one, where a request has several


MAX_PAUSE_S = 3600  # a session's blocks are kept so long at most; a cache is kept longer


class Extension(Body):
    """The vendor block of a request, under the key `cachesvc`."""

    details: bool | None = None  # timings, miss reasons and cost in the answer
    receipt: bool | None = None  # a signed receipt in the answer
    cache: bool | None = None  # False: neither read nor written
    share: str | None = None  # name of a sharing group that the tenant belongs to
    contents: Items[ContentSpan] | None = None  # what placeholder tokens stand for
    require_hit: Probability | None = None  # of the prompt, else 409 with a quote
    max_price: Annotated[str, Field(max_length=40)] | None = None  # a decimal, else the same
    pause_s: Annotated[float, Field(ge=0, le=MAX_PAUSE_S)] | None = None  # of the session; 0 ends
    publish: bool | None = None  # answer when the prompt's blocks are in the shared tier


class ImageUrl(Body):
    url: str
    detail: str | None = None  # the model's own processor decides


class ContentPart(Body):
    type: str
    text: str | None = None
    image_url: ImageUrl | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def text(self, number: int) -> str:
        """The content as one string; parts other than text are refused, by position."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(
            self._part_text(part, number, place) for place, part in enumerate(self.content)
        )

    def images(self, number: int) -> list[ImageAsked]:
        """The images that a message of the user shows, in order; of others none are read."""
        if self.role != "user" or not isinstance(self.content, list):
            return []
        where = f"messages[{number}].content[{{}}].image_url.url"
        return [
            ImageAsked(part.image_url.url, where.format(place))
            for place, part in enumerate(self.content)
            if part.type == "image_url" and part.image_url is not None
        ]

    def _parts(self, number: int) -> list[dict[str, Any]]:
        """The content as templates of models that see read it."""
        assert isinstance(self.content, list)
        return [
            {"type": "image"}
            if part.type == "image_url" and part.image_url is not None
            else {"type": "text", "text": self._part_text(part, number, place)}
            for place, part in enumerate(self.content)
        ]

    def _part_text(self, part: ContentPart, number: int, place: int) -> str:
        if part.type != "text" or part.text is None:
            where = f"messages[{number}].content[{place}]"
            advice = ", and image_url in messages of the user" if part.type == "image_url" else ""
            raise Unsupported(
                f"{where} has type '{part.type[:40]}'; this server reads text parts, as "
                f'{{"type": "text", "text": "..."}}{advice}.',
                param=where,
            )
        return part.text

    def for_template(self, number: int) -> dict[str, Any]:
        """The message as chat templates know it: `developer` is their `system`."""
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._parts(number) if self.images(number) else self.text(number),
        }
        for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                plain[name] = value
        return plain


class GenerationBody(Body):
    """What chat and completions share. None everywhere means the default."""

    model_config = ConfigDict(extra="allow")  # kept to be refused by name, where they must be

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
    prompt_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: dict[str, Any] | str | None = None
    user: str | None = None
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

    def refuse_unserved(self) -> None:
        """Raises Unsupported for known fields that would change the answer."""
        refuse_unserved(self.model_extra or {}, GENERATION, self.unserved)
        if self.prompt_logprobs is not None and self.stream:
            raise Unsupported(
                "prompt_logprobs are not served in streams; leave out stream.",
                param="prompt_logprobs",
            )

    @property
    def prompt_logprobs_asked(self) -> int | None:
        return self.prompt_logprobs

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

    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    modalities: Items[str] | None = None
    web_search_options: Any = None
    store: bool | None = None
    add_generation_prompt: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    def refuse_unserved(self) -> None:
        super().refuse_unserved()
        for name in ("functions", "function_call"):
            if getattr(self, name) is not None:
                raise Unsupported(f"{name} is not served; use tools.", param=name)
        for name in ("audio", "web_search_options"):
            if getattr(self, name) is not None:
                raise Unsupported(f"{name} is not served; leave it out.", param=name)
        if set(self.modalities or ()) - {"text"}:
            raise Unsupported("Only the modality 'text' is served.", param="modalities")
        if self.store:
            raise Unsupported("Answers are not stored here; leave out store.", param="store")

    @property
    def completion_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

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
    max_tokens: Count | None = None  # 0 computes the prompt alone
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompt_is_texts_or_ids(cls, prompt: object) -> object:
        """Instead of pydantic's look, which would try each of the four shapes on every item."""
        if isinstance(prompt, list) and len(prompt) > IDS_MAX:
            raise ValueError(f"should have at most {IDS_MAX} items")
        if not (isinstance(prompt, str) or _is_list_of(prompt, str) or _is_ids(prompt)):
            several = isinstance(prompt, list) and all(map(_is_ids, prompt))
            if not several:
                raise ValueError("should be a text, a list of texts, token ids, or a list of such")
        return prompt

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, each a text or its token ids; refuses those without a token."""
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

    def refuse_unserved(self) -> None:
        super().refuse_unserved()
        if self.echo and self.logprobs is not None and self.stream:
            raise Unsupported(
                "logprobs of an echoed prompt are not served in streams; leave out echo, logprobs "
                "or stream.",
                param="logprobs",
            )
        if self.suffix:
            raise Unsupported("suffix is not served; put all text before the gap.", param="suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise Unsupported(
                "best_of other than n is not served; ask for n choices and pick one.",
                param="best_of",
            )

    @property
    def prompt_logprobs_asked(self) -> int | None:
        """By the field of that name, or by `echo` with `logprobs`."""
        echoed = self.logprobs if self.echo else None
        given = [count for count in (echoed, self.prompt_logprobs) if count is not None]
        return max(given, default=None)


class QuoteBody(Body):
    """Enough of a body to tell what it is."""

    messages: list[Any] | None = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    text: str | None = None
    messages: Annotated[list[Message], Field(max_length=MESSAGES_MAX, fail_fast=True)] | None = None
    tools: Items[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    def as_chat(self, model: str) -> ChatBody:
        """The chat that is asked about."""
        fields = {"messages", "tools", "chat_template_kwargs", "add_generation_prompt"}
        given = {name: getattr(self, name) for name in fields & self.model_fields_set}
        return ChatBody.model_construct(model=model, **given)


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=IDS_MAX, fail_fast=True)]


BodyType = TypeVar("BodyType", bound=Body)


def parse(raw: bytes, kind: type[BodyType]) -> BodyType:
    """`raw` as a `kind`. Raises NotJson or InvalidRequest; quotes no text of the request."""
    try:
        document = _loaded(raw)
    except orjson.JSONDecodeError as error:
        raise NotJson(
            f"The body is not valid JSON ({error.msg} at line {error.lineno}, column "
            f"{error.colno}); send one JSON object in UTF-8."
        ) from None
    if not isinstance(document, dict):
        raise NotJson(f"The body is a JSON {_json_name(document)}; send one JSON object.")
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False, include_context=False)) from None


def _loaded(raw: bytes) -> object:
    """The JSON, without collections in between: every new object of a large body would be walked
    again and again, for 4 s instead of 1 where 16 MiB are all brackets."""
    paused = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(raw)
    finally:
        if paused:
            gc.enable()


def sampling_params(
    body: GenerationBody,
    *,
    max_tokens: int,
    logprobs: int | None,
) -> SamplingParams:
    """The engine's parameters. Stop strings stay with the text side, which finds them."""
    given: dict[str, Any] = {
        "n": body.n,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(body.top_k, 0),  # -1 and 0 both mean all
        "min_p": body.min_p,
        "seed": body.seed,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logprobs": logprobs,
        "prompt_logprobs": body.prompt_logprobs_asked,
    }
    return SamplingParams(
        max_tokens=max_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        **{name: value for name, value in given.items() if value is not None},
    )


def refusal(found: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """The first thing wrong, in OpenAI's words: the path of the field and what it should be.

    `found` are pydantic's errors.
    """
    first = _deepest(found)
    path = _path(first["loc"])
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if first["type"] == "missing":
        return InvalidRequest(f"Missing required parameter: '{path}'.", param=path)
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"Unknown parameter: '{path}'.", param=path)
    got = _shown(first["input"])
    return InvalidRequest(f"Invalid '{path}': {message}; got {got}.", param=path)


def _deepest(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The most telling error: of a union's branches, the one that got furthest into the value."""
    field = found[0]["loc"][0]
    return max(
        (one for one in found if one["loc"][0] == field),
        key=lambda one: (len(one["loc"]), one["type"] == "too_long"),
    )


def _path(location: tuple[int | str, ...]) -> str:
    """('messages', 0, 'role') as messages[0].role, without pydantic's names of union branches."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in {"str", "int"}:
            path += f".{part}" if path else part
    return path


def _shown(value: object) -> str:
    """A value as it may stand in an error and a log: numbers and words, never a text."""
    if value is None or isinstance(value, bool | float):
        return orjson.dumps(value).decode()
    if isinstance(value, int) and abs(value) < 1 << 64:
        return str(value)
    if isinstance(value, str) and len(value) <= 24 and value.isidentifier():
        return f"'{value}'"
    return f"a JSON {_json_name(value)}"


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)


def _is_ids(value: object) -> bool:
    return _is_list_of(value, int)


def _json_name(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")

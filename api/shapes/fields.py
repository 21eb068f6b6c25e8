"""Fields of other servers that this one does not honour: refused, or ignored on purpose.

A field that would change the answer or its meaning is refused, with what to do instead, unless its
value changes nothing. A field that changes neither is ignored, for a stated reason. A field in no
table is unknown; it is ignored too. The header X-Cachesvc-Ignored of the answer names both.
`make docs` joins these tables with the fields that are honoured.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from api.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Unserved:
    """`neutral` are the values that change nothing; None never does."""

    advice: str
    neutral: tuple[object, ...] = (False,)


IGNORED_NAMES_MOST: Final = 20  # in the header
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")

_BIAS = "use logit_bias, or structured_outputs for a choice of answers"
_EMPTY: Final[tuple[object, ...]] = ([], {}, "")
_LEAVE = Unserved("leave it out", _EMPTY)
_NO_SPECIAL = Unserved("special tokens are never in the text", (True,))

_FORMS: Final = {  # of answers, as vLLM had them before, and as SGLang has them
    **dict.fromkeys(("guided_json", "json_schema"), "json"),
    **dict.fromkeys(("guided_regex", "regex"), "regex"),
    **dict.fromkeys(("guided_grammar", "ebnf"), "grammar"),
    "guided_choice": "choice",
}

GENERATION: Final[Mapping[str, Unserved]] = {
    **{name: Unserved(f"use structured_outputs.{kind}", _EMPTY) for name, kind in _FORMS.items()},
    **dict.fromkeys(("allowed_token_ids", "logits_processors"), Unserved(_BIAS, _EMPTY)),
    "bad_words": Unserved("use logit_bias to forbid tokens", _EMPTY),
    "cache_type": Unserved("every prompt is cached; cachesvc.cache can turn that off", _EMPTY),
    **dict.fromkeys(("custom_logit_processor", "guided_whitespace_pattern"), _LEAVE),
    "include_stop_str_in_output": Unserved("append the stop string yourself"),
    "length_penalty": Unserved("beam search is not served", (1, 1.0)),
    "lora_path": Unserved("name the adapter as the model", _EMPTY),
    "no_repeat_ngram_size": Unserved("use repetition_penalty", (0,)),
    "prompt_embeds": Unserved("send a text or token ids", _EMPTY),
    "prompt_logprobs": Unserved("use /v1/completions with echo and logprobs", ()),
    "return_token_ids": Unserved("/tokenize gives the ids of a text"),
    "return_tokens_as_token_ids": Unserved("logprobs name tokens by their text"),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), _NO_SPECIAL),
    "tenant": Unserved("the API key names the tenant", _EMPTY),
    "truncate_prompt_tokens": Unserved("shorten the prompt yourself", ()),
    "typical_p": Unserved("use top_p or min_p", (1, 1.0)),
    "use_beam_search": Unserved("ask for n choices and pick one"),
}
CHAT: Final[Mapping[str, Unserved]] = {
    "add_special_tokens": Unserved("the chat template writes them"),
    "chat_template": Unserved(
        "the model's own template is used; chat_template_kwargs reach it", ("",)
    ),
    "documents": Unserved("put their text into a message", _EMPTY),
    "echo": Unserved("put the last message before the answer yourself"),
    "audio": Unserved("no model here hears or speaks; leave it out", ()),
    **dict.fromkeys(("function_call", "functions"), Unserved("use tools", ())),
    "modalities": Unserved("every answer is text", (["text"], [])),
    "web_search_options": Unserved("search yourself, and put what was found into a message", ()),
    "asr_options": Unserved("no model here hears", _EMPTY),
    "enable_code_interpreter": Unserved("run the model's tool calls yourself"),
    "enable_search": Unserved("search yourself, and put what was found into a message"),
    "max_input_tokens": Unserved("shorten the messages yourself", ()),
    "moderation": Unserved("run a moderation model in front of this server", _EMPTY),
    "plugins": Unserved("this server runs no tools of its own", _EMPTY),
    "preserve_thinking": Unserved("use chat_template_kwargs, if the template reads it"),
    "search_options": Unserved("search yourself, and put what was found into a message", _EMPTY),
    "skill": Unserved("put its text into the system message", _EMPTY),
    "thinking_budget": Unserved("use max_completion_tokens, or reasoning_effort", ()),
    "transforms": Unserved("shorten the messages yourself", _EMPTY),
    "translation_options": Unserved("ask for the translation in a message", _EMPTY),
    "vl_high_resolution_images": Unserved("this model reads text only"),
    "voice": Unserved("no model here speaks", _EMPTY),
}
COMPLETIONS: Final[Mapping[str, Unserved]] = {
    "add_special_tokens": Unserved("send token ids, which nothing is added to", (True,)),
    "suffix": Unserved("put all text before the gap", ("",)),
}

RESPONSES: Final[Mapping[str, Unserved]] = {
    "access_programs": _LEAVE,
    "background": Unserved("leave it out, and stream instead"),
    "background_options": Unserved(
        "leave it out, and stream instead", (*_EMPTY, {"completion_window": "soonest"})
    ),
    "context_management": Unserved("shorten the conversation yourself", _EMPTY),
    "conversation": Unserved("use previous_response_id", ("",)),
    "image": Unserved("this model reads text only", _EMPTY),
    "max_tool_calls": Unserved("this server runs no tools of its own", ()),
    "moderation": Unserved("run a moderation model in front of this server", _EMPTY),
    "personality": Unserved("describe it in the instructions", ("",)),
    "prompt": Unserved("send the prompt's text as instructions and input", ({},)),
    "tenant": Unserved("the API key names the tenant", _EMPTY),
    "top_logprobs": Unserved("use /v1/chat/completions", (0,)),
    "truncation": Unserved("shorten the input yourself", ("disabled",)),
}
MESSAGES: Final[Mapping[str, Unserved]] = {
    "compaction": Unserved("shorten the conversation yourself", _EMPTY),
    "container": Unserved("leave it out", ({}, "")),
    "fallbacks": Unserved("name one model; a gateway can try others", _EMPTY),
    "inference_geo": Unserved("leave it out", ("",)),
    "mcp_servers": Unserved("give their tools as tools", ([],)),
    "tenant": Unserved("the API key names the tenant", _EMPTY),
    "thread": Unserved("send the whole conversation", _EMPTY),
}

_NO_EFFECT = "a hint about speed; the answer is the same"
IGNORED_GENERATION: Final[Mapping[str, str]] = {
    "priority": "the server's fair shares decide the order",
    "request_id": "X-Request-Id names a request",
}
IGNORED_CHAT: Final[Mapping[str, str]] = {
    **IGNORED_GENERATION,
    "prediction": _NO_EFFECT,
    "store": "answers are stored by /v1/responses alone",
    "tool_stream": "the arguments of calls always come in pieces",
    "verbosity": "a hint that no template reads",
}
IGNORED_RESPONSES: Final[Mapping[str, str]] = {"stream_options": "streams are never obfuscated"}
IGNORED_MESSAGES: Final[Mapping[str, str]] = {
    "betas": "the header's betas are not needed",
    "billing_policy": "the rate card decides the price",
    "diagnostics": "GET /v1/cache/requests/ID says why a prompt missed",
    "fallback_credit_token": "there is no fallback to credit",
    "speed": _NO_EFFECT,
    "user_profile_id": "no profile is kept",
    "workspace_id": "the API key names the tenant",
}


def ignored_names(body: BaseModel, *more: str) -> list[str]:
    """The names that a header can show of fields that `body` and the objects in it do not declare,
    and of `more` that is ignored."""
    return sorted({name for name in (*_undeclared(body), *more) if _NAME.fullmatch(name)})[
        :IGNORED_NAMES_MOST
    ]


def check_fields(body: BaseModel, *tables: Mapping[str, Unserved]) -> list[str]:
    """The ignored names of a body. Raises Unsupported like `refuse_unserved`."""
    refuse_unserved(body.model_extra or {}, *tables)
    return ignored_names(body)


def _undeclared(body: BaseModel, path: str = "") -> Iterator[str]:
    for name, value in (body.model_extra or {}).items():
        if value is not None:
            yield path + name
    for name in body.model_fields_set - (body.model_extra or {}).keys():
        if isinstance(value := getattr(body, name), BaseModel):
            yield from _undeclared(value, f"{path}{name}.")


def refuse_unserved(given: Mapping[str, Any], *tables: Mapping[str, Unserved]) -> None:
    """Raises Unsupported for the first field in `given` that is in a table and not neutral."""
    for table in tables:
        for name in given.keys() & table.keys():
            value, field = given[name], table[name]
            # False is not 0.
            is_neutral = any(type(value) is type(one) and value == one for one in field.neutral)
            if value is not None and not is_neutral:
                raise Unsupported(f"{name} is not served; {field.advice}.", param=name)

"""Fields of other servers that would change the answer and are not served. They are refused.

Each field is listed with the values that change nothing and with what to do instead. A field in no
table is unknown and ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Unserved:
    """`neutral` are the values that change nothing; None never does."""

    advice: str
    neutral: tuple[object, ...] = (False,)


_BIAS = "use logit_bias, or structured_outputs for a choice of answers"
_EMPTY: Final[tuple[object, ...]] = ([], {}, "")

GENERATION: Final[Mapping[str, Unserved]] = {
    "allowed_token_ids": Unserved(_BIAS, _EMPTY),
    "bad_words": Unserved("use logit_bias to forbid tokens", _EMPTY),
    "custom_logit_processor": Unserved("leave it out", _EMPTY),
    "guided_whitespace_pattern": Unserved("leave it out", _EMPTY),
    "include_stop_str_in_output": Unserved("append the stop string yourself"),
    "length_penalty": Unserved("beam search is not served", (1, 1.0)),
    "logits_processors": Unserved(_BIAS, _EMPTY),
    "lora_path": Unserved("name the adapter as the model", _EMPTY),
    "no_repeat_ngram_size": Unserved("use repetition_penalty", (0,)),
    "prompt_embeds": Unserved("send a text or token ids", _EMPTY),
    "return_token_ids": Unserved("/tokenize gives the ids of a text"),
    "return_tokens_as_token_ids": Unserved("logprobs name tokens by their text"),
    "skip_special_tokens": Unserved("special tokens are never in the text", (True,)),
    "spaces_between_special_tokens": Unserved("special tokens are never in the text", (True,)),
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
}
COMPLETIONS: Final[Mapping[str, Unserved]] = {
    "add_special_tokens": Unserved("send token ids, which nothing is added to", (True,)),
}


def refuse_unserved(given: Mapping[str, Any], *tables: Mapping[str, Unserved]) -> None:
    """Raises Unsupported for the first field in `given` that is in a table and not neutral."""
    for table in tables:
        for name in given.keys() & table.keys():
            value, field = given[name], table[name]
            if value is not None and not _is_among(value, field.neutral):
                raise Unsupported(f"{name} is not served; {field.advice}.", param=name)


def _is_among(value: object, neutral: Sequence[object]) -> bool:
    """Whether a neutral value is equal and of the same type: False is not 0."""
    return any(type(value) is type(one) and value == one for one in neutral)

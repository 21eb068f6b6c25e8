"""The style in which a model writes calls, found from its chat template."""

import re
from collections.abc import Collection
from enum import StrEnum
from functools import lru_cache

from api.tools import deepseek, harmony, reasoning
from api.tools.deepseek import DeepSeekParser
from api.tools.harmony import HarmonyParser
from api.tools.hermes import HermesParser
from api.tools.json_list import PYTHON_TAG, JsonParser
from api.tools.mistral import ARGS, CALL_ID, CALLS, MistralParser
from api.tools.pieces import Parser, Plain

_TOOLS = re.compile(r"\{[{%][^{}]*\btools\b")


class Style(StrEnum):
    """`TAUGHT` is Hermes' style, explained in the prompt because the template has no tools."""

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"
    DEEPSEEK = "deepseek"
    HARMONY = "harmony"
    TAUGHT = "taught"

    @property
    def has_text_marks(self) -> bool:
        """Whether its markers are text, which a grammar can require."""
        return self in (Style.HERMES, Style.TAUGHT)

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that its parser needs."""
        return _MARKERS.get(self, ())


_MARKERS = {
    Style.LLAMA: (PYTHON_TAG,),
    Style.MISTRAL: (CALLS, ARGS, CALL_ID),
    Style.DEEPSEEK: (
        deepseek.CALLS_BEGIN,
        deepseek.CALLS_END,
        deepseek.CALL_BEGIN,
        deepseek.CALL_END,
        deepseek.SEPARATOR,
    ),
    Style.HARMONY: harmony.MARKERS,
}
THOUGHT_MARKERS = (reasoning.OPEN, reasoning.CLOSE)


@lru_cache(maxsize=64)  # of the served models
def style_of(template: str | None) -> Style:
    """The style, by the markers in the template.

    `TAUGHT` if the template does not read `tools` or writes no known markers.
    """
    template = template or ""
    if harmony.CHANNEL in template:
        return Style.HARMONY
    if not _TOOLS.search(template):
        return Style.TAUGHT
    if deepseek.CALLS_BEGIN in template:
        return Style.DEEPSEEK
    if CALLS in template:
        return Style.MISTRAL
    if PYTHON_TAG in template or '"parameters": dictionary' in template:
        return Style.LLAMA
    if "<tool_call>" in template:
        return Style.HERMES
    return Style.TAUGHT


@lru_cache(maxsize=64)
def thinks(template: str | None) -> bool:
    """Whether the template has reasoning between `<think>` and `</think>`."""
    return reasoning.CLOSE in (template or "")


def parser_of(style: Style, names: Collection[str], *, forced: bool, begun: bool) -> Parser:
    """The parser of an answer that may call `names`. Without names, calls are text. `begun`: the
    answer goes on with a message."""
    match style:
        case Style.HARMONY if not forced:
            return HarmonyParser(may_call=bool(names), begun=begun)
        case _ if not names:
            return Plain()
        case Style.HERMES | Style.TAUGHT:
            return HermesParser()
        case Style.MISTRAL if not forced:
            return MistralParser()
        case Style.DEEPSEEK if not forced:
            return DeepSeekParser()
        case _:
            return JsonParser(names)

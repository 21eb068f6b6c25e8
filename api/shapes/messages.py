"""Anthropic's Messages: the body, checked, and as a chat."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from api.errors import InvalidRequest, Unsupported
from api.served_model import ServedModel
from api.shapes.blocks import SYSTEM, ContentReader
from api.shapes.body import MESSAGES_MAX, Body, Items
from api.shapes.breakpoints import NAME_MAX, CacheControl
from api.shapes.fields import MESSAGES, ignored_names, refuse_unserved
from api.shapes.images import text_only
from api.shapes.schemas import ChatBody, Extension, Salt
from api.shapes.template_arguments import fitting_thinking
from api.shapes.translation import Plain, chat_body, going_on, merged_systems
from api.shapes.turns import ContentBlock, TurnMessage, texts_of, turn_messages
from engine.bounds import MAX_COUNT

_SAME_FIELDS = (  # of a message and a chat
    *("max_tokens", "stream", "temperature", "top_p", "top_k", "service_tier", "cache_salt"),
)
EMPTY_MESSAGE = TurnMessage(role="user", content="")


class AnthropicTool(Body):
    model_config = ConfigDict(extra="allow")

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None

    @property
    def is_clients(self) -> bool:
        """Whether it tells all about itself. Other tools are run by Anthropic, or known to its
        models alone."""
        return self.type in (None, "custom")

    @property
    def unread(self) -> Iterator[str]:
        """What is ignored: the tool, or fields of it such as `defer_loading`."""
        if not self.is_clients:
            yield f"tools.{self.name or self.type}"
        else:
            yield from (
                f"tools.{name}" for name, value in (self.model_extra or {}).items() if value
            )


class AnthropicChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(Body):
    user_id: str | None = None


class Diagnostics(Body):
    previous_message_id: Annotated[str, Field(max_length=NAME_MAX)] | None = None


class OutputConfig(Body):
    effort: str | None = None
    format: dict[str, Any] | None = None
    task_budget: None = None  # refused


@dataclass(frozen=True, slots=True)
class MarkedPlace:
    """A point of the prompt to keep it up to.

    It is after `messages` messages and `blocks` blocks of the last of them (0: all). Before the
    first message it is after `blocks` blocks of the system prompt (None: all), including the tools.
    """

    ttl: Literal["5m", "1h"]
    messages: int = 0
    blocks: int = 0
    system: int | None = None


class CountBody(Body):
    """The fields that make up the prompt, which are all that `count_tokens` needs."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[
        list[TurnMessage], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)
    ]
    system: str | Items[ContentBlock] | None = None
    tools: Items[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: dict[str, Any] | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None

    @property
    def ignored(self) -> list[str]:
        """The names of fields and tools that this server does not know or ignores on purpose."""
        tools = (name for tool in self.tools or [] for name in tool.unread)
        contents = (each.content for each in self.messages if isinstance(each.content, list))
        cites = any(block.asks_to_cite for content in contents for block in content)
        return ignored_names(self, *tools, *(["messages.citations"] if cites else []))

    def as_chat(self, model: ServedModel, *, whole: bool = True) -> ChatBody:
        """The body as a chat for a model. Raises InvalidRequest or Unsupported, by field.

        The `whole` chat continues a last message of the assistant, and its newest turn may hold
        nothing that the model cannot see.
        """
        refuse_unserved(self.model_extra or {}, MESSAGES)
        self._refuse_edits()
        output = self.output_config or OutputConfig()
        choice, form = self.tool_choice, output.format or self.output_format
        tools = [_function(n, tool) for n, tool in enumerate(self.tools or []) if tool.is_clients]
        messages = merged_systems(
            [*self._system(), *self._turns(self._newest() if whole else range(0))]
        )
        forced = choice is not None and choice.type in ("any", "tool")
        barred = {"tool_choice": forced, "output_config.format": form is not None}
        return chat_body(
            {
                **(going_on(messages, "messages", barred) if whole else {"messages": messages}),
                "model": self.model,
                "tools": tools or None,
                "tool_choice": _chosen(choice) if choice else None,
                "parallel_tool_calls": None
                if choice is None or choice.disable_parallel_tool_use is None
                else not choice.disable_parallel_tool_use,
                "reasoning_effort": output.effort,
                "response_format": _format(form),
                "thinking": fitting_thinking(self.thinking, model.tokenizer.chat_template),
                **self._answer(),
            }
        )

    def _answer(self) -> Plain:
        """The fields of a chat that shape its answer."""
        return {}

    def breakpoints(self) -> "Iterator[MarkedPlace]":
        """The points up to which the client asks to keep the prompt, in order."""
        for tool in self.tools or []:
            if tool.cache_control is not None:
                yield MarkedPlace(tool.cache_control.ttl or "5m")
        for number, block in enumerate(self.system if isinstance(self.system, list) else []):
            if block.cache_control is not None:
                yield MarkedPlace(block.cache_control.ttl or "5m", system=number + 1)
        for number, message in enumerate(self.messages):
            content = message.content if isinstance(message.content, list) else []
            for place, block in enumerate(content):
                if block.cache_control is not None:
                    ttl = block.cache_control.ttl or "5m"
                    yield MarkedPlace(ttl, messages=number + 1, blocks=place + 1)
        if self.cache_control is not None:
            yield MarkedPlace(self.cache_control.ttl or "5m", messages=len(self.messages))

    def until(self, point: "MarkedPlace") -> "CountBody | None":
        """The body cut at a breakpoint; None if that is its end.

        A chat must have a message. A cut before the first one gets an empty message, which diverges
        from the whole chat where the first message's text begins.
        """
        if not point.messages:
            system = self.system
            if isinstance(system, list) and point.system is not None:
                system = system[: point.system]
            return self.model_copy(update={"system": system, "messages": [EMPTY_MESSAGE]})
        *before, last = self.messages[: point.messages]
        content = last.content if isinstance(last.content, list) else []
        blocks = point.blocks or len(content)
        if point.messages == len(self.messages) and blocks == len(content):
            return None
        cut = last.model_copy(update={"content": content[:blocks]})
        return self.model_copy(update={"messages": [*before, cut]})

    def _refuse_edits(self) -> None:
        """Refuses context edits: the template decides about old reasoning, and tool results are
        never dropped."""
        for edit in (self.context_management or {}).get("edits") or []:
            kind = edit.get("type", "") if isinstance(edit, dict) else ""
            if not str(kind).startswith("clear_thinking"):
                raise Unsupported(
                    "context_management.edits other than clear_thinking are not served; shorten "
                    "the conversation yourself.",
                    param="context_management.edits",
                )

    def _system(self) -> Iterator[Plain]:
        if self.system is None:
            return
        if isinstance(self.system, str):
            text = self.system
        else:
            text = texts_of(ContentReader(), self.system, SYSTEM, "system")
        yield {"role": "system", "content": text}

    def _newest(self) -> range:
        """The messages after the last answer, before one that is to be continued."""
        roles = [message.role for message in self.messages]
        while roles and roles[-1] == "assistant":
            roles.pop()
        before = (n for n in reversed(range(len(roles))) if roles[n] == "assistant")
        return range(next(before, -1) + 1, len(roles))

    def _turns(self, newest: range) -> Iterator[Plain]:
        """The messages. Raises Unsupported for what the model cannot see of the `newest`."""
        for number, message in enumerate(self.messages):
            reader = ContentReader()
            yield from turn_messages(reader, message, f"messages[{number}].content")
            if reader.unseen and number in newest:
                raise text_only(*reader.unseen[0])


class MessagesBody(CountBody):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    diagnostics: Diagnostics | None = None
    cache_salt: Salt | None = None
    cachesvc: Extension | None = None

    def _answer(self) -> Plain:
        return {name: getattr(self, name) for name in _SAME_FIELDS} | {
            "stop": self.stop_sequences or None,
            "user": self.metadata.user_id if self.metadata else None,
            "cachesvc": self.cachesvc.model_dump() if self.cachesvc else None,
        }


def _function(number: int, tool: AnthropicTool) -> Plain:
    if tool.input_schema is None or not tool.name:
        raise InvalidRequest(
            f"tools[{number}] must have a name and an input_schema.", param=f"tools[{number}]"
        )
    function: Plain = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _chosen(choice: AnthropicChoice) -> object:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("Missing required parameter: 'tool_choice.name'.", param="name")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _format(given: Plain | None) -> Plain | None:
    if given is None:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise InvalidRequest(
            "output_config.format must be of type 'json_schema' and have a schema.",
            param="output_config.format",
        )
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}

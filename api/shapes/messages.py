"""Anthropic's Messages: the body, checked, and as a chat."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from api.errors import InvalidRequest, Unsupported
from api.served_model import ServedModel
from api.shapes.blocks import ContentReader
from api.shapes.body import MESSAGES_MAX, Body, Items
from api.shapes.fields import MESSAGES, ignored_names, refuse_unserved
from api.shapes.message import CacheControl, text_only
from api.shapes.schemas import ChatBody, Extension, Salt
from api.shapes.template import fitting_thinking
from api.shapes.translation import Plain, chat_body, going_on, merged_systems
from api.shapes.turns import ContentBlock, TurnMessage, system_content, turn_messages
from engine.bounds import MAX_COUNT

_SAME_FIELDS = (  # of a message and a chat
    *("max_tokens", "stream", "temperature", "top_p", "top_k", "service_tier", "cache_salt"),
    "cachesvc",
)


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
            yield from (f"tools.{name}" for name, it in (self.model_extra or {}).items() if it)


class AnthropicChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(Body):
    user_id: str | None = None


class OutputConfig(Body):
    effort: str | None = None
    format: dict[str, Any] | None = None
    task_budget: None = None  # refused


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

    def as_chat(self, model: ServedModel) -> ChatBody:
        """The body as a chat for a model. Raises InvalidRequest or Unsupported, by field.

        It continues a last message of the assistant, and its newest turn may hold nothing that the
        model cannot see.
        """
        refuse_unserved(self.model_extra or {}, MESSAGES)
        self._refuse_edits()
        output = self.output_config or OutputConfig()
        choice, form = self.tool_choice, output.format or self.output_format
        tools = [_function(n, tool) for n, tool in enumerate(self.tools or []) if tool.is_clients]
        messages = merged_systems([*self._system(), *self._turns()])
        forced = choice is not None and choice.type in ("any", "tool")
        barred = {"tool_choice": forced, "output_config.format": form is not None}
        return chat_body(
            {
                **going_on(messages, "messages", barred),
                "model": self.model,
                "tools": tools or None,
                "tool_choice": _chosen(choice) if choice else None,
                "parallel_tool_calls": None
                if choice is None or choice.disable_parallel_tool_use is None
                else not choice.disable_parallel_tool_use,
                "reasoning_effort": output.effort,
                "response_format": _format(form),
                "cache_control": self.cache_control,
                "thinking": fitting_thinking(self.thinking, model.tokenizer.chat_template),
                **self._answer(),
            }
        )

    def _answer(self) -> Plain:
        """The fields of a chat that shape its answer."""
        return {}

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
        if self.system is not None:
            told = self.system if isinstance(self.system, str) else system_content(self.system)
            yield {"role": "system", "content": told}

    def _newest(self) -> range:
        """The messages after the last answer, before one that is to be continued."""
        roles = [message.role for message in self.messages]
        while roles and roles[-1] == "assistant":
            roles.pop()
        before = (n for n in reversed(range(len(roles))) if roles[n] == "assistant")
        return range(next(before, -1) + 1, len(roles))

    def _turns(self) -> Iterator[Plain]:
        """The messages. Raises Unsupported for what the model cannot see of the newest."""
        newest = self._newest()
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
    cache_salt: Salt | None = None
    cachesvc: Extension | None = None

    def _answer(self) -> Plain:
        return {name: getattr(self, name) for name in _SAME_FIELDS} | {
            "stop": self.stop_sequences or None,
            "user": self.metadata.user_id if self.metadata else None,
        }


def _function(number: int, tool: AnthropicTool) -> Plain:
    if tool.input_schema is None or not tool.name:
        raise InvalidRequest(
            f"tools[{number}] must have a name and an input_schema.", param=f"tools[{number}]"
        )
    more = tool.model_dump(include={"description", "strict"}, exclude_none=True)
    function = {"name": tool.name, "parameters": tool.input_schema, **more}
    return {"type": "function", "function": function, "cache_control": tool.cache_control}


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

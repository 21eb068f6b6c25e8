"""The content blocks of Anthropic's Messages: where each type may stand, and its text in a prompt.

A type that is not in the table, or stands elsewhere, is refused by type and place. What no model
sees, such as a PDF, has a short text in its place: agents send their whole history again, and would
be refused for ever. In the newest turn of the user it is refused; see `api.shapes.messages`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from api.errors import InvalidRequest, Unsupported

TEXTS_JOIN = "\n\n"  # between texts of one list

USER, ASSISTANT, SYSTEM, RESULT, INSIDE = "user", "assistant", "system", "tool result", "block"


@dataclass(frozen=True, slots=True)
class BlockKind:
    """One type of blocks. Its text is `head`, with the block's fields filled in, and then the
    texts of `fields`; empty if it has neither."""

    places: tuple[str, ...]  # INSIDE: in a field of another block
    fields: tuple[str, ...] = ()
    head: str = ""
    unseen: bool = False  # `head` stands for what the model cannot see


_CALLED = BlockKind((ASSISTANT,), head="[called {name} {input}]")
_ANSWERED = BlockKind((ASSISTANT,), ("content",))  # by a tool of the server
_SERVERS = (  # the tools of servers
    *("mcp", "web_search", "web_fetch", "advisor", "tool_search"),
    *("code_execution", "bash_code_execution", "text_editor_code_execution"),
)
_TOLD = (  # inside of their results
    *("web_search_result", "web_fetch_result", "advisor_result", "tool_search_tool_search_result"),
    *("code_execution_result", "encrypted_code_execution_result", "bash_code_execution_result"),
    "text_editor_code_execution_view_result",
    "text_editor_code_execution_str_replace_result",
)
_INSIDE = BlockKind(
    (INSIDE,), ("title", "url", "text", "stdout", "stderr", "content", "lines", "tool_references")
)
_FILE = BlockKind((INSIDE,), head="[file {file_id}]")
_ERROR = BlockKind((INSIDE,), ("error_message",), "[error {error_code}]")  # of every type *_error
_DOCUMENT = BlockKind((INSIDE,), head="[document not shown]", unseen=True)

KINDS: Final[Mapping[str, BlockKind]] = {
    "text": BlockKind((USER, ASSISTANT, SYSTEM, RESULT, INSIDE), ("text",)),
    "image": BlockKind((USER, RESULT, INSIDE), head="[image not shown]", unseen=True),
    "document": BlockKind((USER, RESULT, INSIDE), ("title", "context", "source")),
    "search_result": BlockKind((USER, RESULT), ("title", "source", "content")),
    "container_upload": BlockKind((USER,), head="[file {file_id} not shown]", unseen=True),
    "tool_result": BlockKind((USER,)),  # a message of its own
    "tool_use": BlockKind((ASSISTANT,)),  # this and reasoning are fields of their message
    "thinking": BlockKind((ASSISTANT,)),
    "redacted_thinking": BlockKind((ASSISTANT,)),
    "fallback": BlockKind((ASSISTANT,)),
    "compaction": BlockKind((ASSISTANT,), ("content",)),
    "mcp_tool_listing": BlockKind((ASSISTANT,), head="[tools of {mcp_server_name}]"),
    "server_tool_use": _CALLED,
    "mcp_tool_use": _CALLED,
    **{f"{tool}_tool_result": _ANSWERED for tool in _SERVERS},
    "tool_reference": BlockKind((RESULT, INSIDE), head="[tool {tool_name}]"),
    "browser_state": BlockKind((RESULT,), head="[browser tabs {tabs} {state_changes}]"),
    **dict.fromkeys(_TOLD, _INSIDE),
    **dict.fromkeys(("code_execution_output", "bash_code_execution_output"), _FILE),
    "advisor_redacted_result": BlockKind((INSIDE,), head="[advice not shown]"),
    "text_editor_code_execution_create_result": BlockKind((INSIDE,), head="[file written]"),
    # By field and type: the sources of a document.
    "source.text": BlockKind((INSIDE,), ("data",)),
    "source.content": BlockKind((INSIDE,), ("content",)),
    "source.base64": _DOCUMENT,
    "source.url": _DOCUMENT,
    "source.file": _DOCUMENT,
}


def kind_of(block: Mapping[str, Any], within: str, where: str, name: str = "") -> BlockKind:
    """The kind of a block `within` a message or, as its field `name`, another block."""
    given = str(block.get("type"))
    kind = KINDS.get(f"{name}.{given}") or KINDS.get(given)
    if kind is None and given.endswith("_tool_result_error"):
        kind = _ERROR
    if kind is None or within not in kind.places:
        places = f"stands in a {' or '.join(kind.places)}" if kind else "this server does not know"
        raise Unsupported(
            f"{where} is of type {given[:60]!r}, which {places}; leave it out of this {within}.",
            param=where,
        )
    return kind


@dataclass(slots=True)
class ContentReader:
    """Reads blocks as text. `unseen` gathers the type and place of each block that the model cannot
    see."""

    unseen: list[tuple[str, str]] = field(default_factory=list)

    def text(self, block: Mapping[str, Any], within: str, where: str, name: str = "") -> str:
        """The block's text. Raises Unsupported and InvalidRequest, by place."""
        kind = kind_of(block, within, where, name)
        if kind.unseen:
            self.unseen.append((str(block["type"]), where))
        head = kind.head.format_map(_Filled(block)) if kind.head else ""
        told = (self.texts(block.get(at), INSIDE, f"{where}.{at}", at) for at in kind.fields)
        if kind is KINDS["text"] and not isinstance(block.get("text"), str):
            raise InvalidRequest(f"{where}.text must be a text.", param=f"{where}.text")
        return "\n".join(filter(None, (head, *told)))

    def texts(self, value: object, within: str, where: str, name: str = "") -> str:
        """The text of a field: a text, a block, or a list of them."""
        match value:
            case None:
                return ""
            case str():
                return value
            case list():
                several = enumerate(value)
                told = (self.texts(each, within, f"{where}[{n}]", name) for n, each in several)
                return TEXTS_JOIN.join(filter(None, told))
            case dict():
                return self.text(value, within, where, name)
        raise InvalidRequest(f"{where} must be a text or a list of blocks.", param=where)


class _Filled(dict[str, Any]):
    """A block's fields as a head shows them; what is missing is empty."""

    def __getitem__(self, name: str) -> str:
        value = self.get(name, "")
        return value if isinstance(value, str) else orjson.dumps(value).decode()

"""Agent frameworks against a server on a socket: their tools, their structured output, their loop.

The engine is scripted and follows no grammar, so what is tested is what the frameworks send and
read; that forced calls are valid is tested on the default model.
"""

import asyncio
from typing import Annotated, Any, Literal

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import BaseModel, Field, SecretStr
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.api.test_structured_wire import RecordingCompiler
from tests.e2e.conftest import Server, on_a_socket
from tests.support.wire import ByteTokenizer, Script, fake_house


class Place(BaseModel):
    """Where to go."""

    city: Literal["rome", "paris"]
    nights: Annotated[int, Field(ge=1, le=9)]


ROME = Place(city="rome", nights=3)


def called(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {ROME.model_dump_json()}}}</tool_call>'


@pytest.fixture
def server():
    with on_a_socket(fake_house(grammars=RecordingCompiler())) as running:
        yield running


def chat_model(server: Server, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(model="bytes", base_url=server.url, api_key=SecretStr("any"), **fields)


def test_langchain_calls_a_function_for_structured_output(server):
    server.house.engine.script = Script(answer=called("Place"))
    chain = chat_model(server).with_structured_output(Place, method="function_calling")
    assert ROME == chain.invoke("Three nights in Rome, please.")


def test_langchain_asks_for_a_schema(server):
    server.house.engine.script = Script(answer=ROME.model_dump_json())
    chain = chat_model(server).with_structured_output(Place, method="json_schema")
    assert ROME == chain.invoke("Three nights in Rome, please.")


def test_langchain_streams_a_call_and_sends_its_result(server):
    server.house.engine.script = Script(answer=called("Place"), tokens_per_step=5)
    model = chat_model(server).bind_tools([Place])
    asked = HumanMessage("Where to?")
    first, *others = model.stream([asked])
    for chunk in others:
        first = first + chunk
    [call] = first.tool_calls
    assert ("Place", ROME.model_dump()) == (call["name"], call["args"])
    server.house.engine.script = Script(answer="Done.")
    result = ToolMessage("booked", tool_call_id=call["id"])
    assert "Done." == model.invoke([asked, first, result]).content
    assert "tool: booked\n" in ByteTokenizer().decode(server.house.engine.requests[-1].tokens)


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
def test_pydantic_ai_gets_its_output_from_a_tool(server, kind):
    server.house.engine.script = Script(answer=called("final_result"))

    async def run() -> Place:
        async with AsyncOpenAI(base_url=server.url, api_key="any") as client:
            model = kind("bytes", provider=OpenAIProvider(openai_client=client))
            answer = await Agent(model, output_type=Place).run("Three nights in Rome, please.")
            return answer.output

    assert ROME == asyncio.run(run())

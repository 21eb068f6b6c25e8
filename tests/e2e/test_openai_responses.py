"""OpenAI's client with Responses, against a server on a socket."""

from typing import Any

import openai
import pytest

from tests.e2e.conftest import Server
from tests.support.wire import ByteTokenizer, Script

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather somewhere.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="sk-any", max_retries=0) as client:
        yield client


def sent(server: Server) -> str:
    return ByteTokenizer().decode(server.house.engine.requests[-1].tokens)


def test_a_stream_ends_with_the_same_response(server, client):
    server.house.engine.script = Script(answer=CALL, tokens_per_step=5)
    with client.responses.stream(model="bytes", input="hi", tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    message, call = final.output
    assert ("message", "function_call", "weather", '{"city": "Rome"}') == (
        message.type,
        call.type,
        call.name,
        call.arguments,
    )
    assert "I look." == final.output_text
    assert list(range(len(events))) == [event.sequence_number for event in events]
    kept = client.responses.retrieve(final.id)
    assert [item.id for item in final.output] == [item.id for item in kept.output]
    assert final.usage == kept.usage
    kinds = [event.type for event in events]
    assert ["response.created", "response.in_progress", "response.output_item.added"] == kinds[:3]
    assert "response.completed" == kinds[-1]
    assert kinds.count("response.function_call_arguments.delta") > 1


def test_the_next_turn_continues_the_last(server, client):
    server.house.engine.script = Script(answer=CALL)
    first = client.responses.create(
        model="bytes", input="hi", instructions="Be short.", tools=[WEATHER]
    )
    server.house.engine.script = Script(answer="20 degrees")
    output: Any = {
        "type": "function_call_output",
        "call_id": first.output[1].call_id,
        "output": "20",
    }
    second = client.responses.create(
        model="bytes", input=[output], previous_response_id=first.id, tools=[WEATHER]
    )
    assert "user: hi\nassistant: I look.\ntool: 20\ntools: 1\nassistant: " == sent(server)
    assert (first.id, "20 degrees") == (second.previous_response_id, second.output_text)


def test_what_is_stored_can_be_asked_for_and_deleted(server, client):
    server.house.engine.script = Script(answer="hello")
    kept = client.responses.create(model="bytes", input="hi")
    assert kept.output_text == client.responses.retrieve(kept.id).output_text
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve(kept.id)
    unkept = client.responses.create(model="bytes", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="bytes", input="x", previous_response_id=unkept.id)

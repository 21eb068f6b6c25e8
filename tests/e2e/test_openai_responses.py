"""OpenAI's client with Responses, against a server on a socket."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.conftest import Server
from tests.support.wire import ByteTokenizer, Script

PROMPT = "user: hi\nassistant: "
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather somewhere.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Reply(BaseModel):
    a: int


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="sk-any", max_retries=0) as client:
        yield client


def sent(server: Server) -> str:
    return ByteTokenizer().decode(server.house.engine.requests[-1].tokens)


def test_a_response(server: Server, client: openai.OpenAI) -> None:
    server.house.engine.script = Script(answer="hello", hits={"hit_disk": 3})
    response = client.responses.create(model="bytes", input="hi")
    assert ("hello", "completed") == (response.output_text, response.status)
    usage = response.usage
    assert usage is not None
    assert (len(PROMPT), 3, 6, 0) == (
        usage.input_tokens,
        usage.input_tokens_details.cached_tokens,
        usage.output_tokens,
        usage.output_tokens_details.reasoning_tokens,
    )


def test_a_stream_ends_with_the_same_response(server: Server, client: openai.OpenAI) -> None:
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


def test_the_next_turn_continues_the_last(server: Server, client: openai.OpenAI) -> None:
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


def test_what_is_stored_can_be_asked_for_and_deleted(server: Server, client: openai.OpenAI) -> None:
    server.house.engine.script = Script(answer="hello")
    kept = client.responses.create(model="bytes", input="hi")
    assert kept.output_text == client.responses.retrieve(kept.id).output_text
    [item] = client.responses.input_items.list(kept.id).data
    assert "hi" == item.content
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve(kept.id)
    unkept = client.responses.create(model="bytes", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="bytes", input="x", previous_response_id=unkept.id)


def test_what_was_cut_short_says_so(server: Server, client: openai.OpenAI) -> None:
    server.house.engine.script = Script(answer="hello")
    response = client.responses.create(model="bytes", input="hi", max_output_tokens=2)
    assert "incomplete" == response.status
    assert response.incomplete_details is not None
    assert ("max_output_tokens", "he") == (response.incomplete_details.reason, response.output_text)


def test_input_tokens(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="bytes", input="hi")
    assert len(PROMPT) == counted.input_tokens


def test_what_is_not_served_is_refused_by_name_and_what_is_served(client: openai.OpenAI) -> None:
    calls: list[Callable[[], object]] = [
        lambda: client.embeddings.create(model="bytes", input="hi"),
        lambda: client.audio.speech.create(model="bytes", voice="alloy", input="hi"),
        lambda: client.files.list(),
        lambda: client.moderations.create(input="hi"),
        lambda: client.images.generate(prompt="hi"),
        lambda: client.batches.list(),
    ]
    for call in calls:
        told = r"/v1/\w+ is not served here: .* This server has /v1/chat/completions"
        with pytest.raises(openai.NotFoundError, match=told) as refused:
            call()
        assert "not_served" == refused.value.code

"""The official clients of OpenAI and Anthropic against a server on a socket: what they read and
retry.

The server is uvicorn as `cachesvc serve` runs it, over the scripted engine, in a thread of its own;
twice it is the real program with the default model. Through a relay: `test_relay_clients.py`.
"""

from typing import Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.wire import Script

MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT_TOKENS = len("user: hi\nassistant: ")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
DETAILS = {"cachesvc": {"details": True}}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="sk-any", max_retries=0) as client:
        yield client


@pytest.fixture
def messages(server):
    """Anthropic's client, for messages."""
    url = server.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="sk-any", max_retries=0) as client:
        yield client.messages


def test_a_response_is_streamed_with_its_call_stored_and_deleted(server, client):
    server.house.engine.script = Script(answer=CALL, tokens_per_step=5)
    weather = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    with client.responses.stream(model="bytes", input="hi", tools=[weather]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    message, call = final.output
    assert ("message", "function_call") == (message.type, call.type)
    assert ("weather", '{"city": "Rome"}') == (call.name, call.arguments)
    assert "I look." == final.output_text
    assert list(range(len(events))) == [event.sequence_number for event in events]
    kinds = [event.type for event in events]
    assert ["response.created", "response.in_progress", "response.output_item.added"] == kinds[:3]
    assert "response.completed" == kinds[-1]
    assert kinds.count("response.function_call_arguments.delta") > 1
    kept = client.responses.retrieve(final.id)
    assert [item.id for item in final.output] == [item.id for item in kept.output]
    assert final.usage == kept.usage
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve(kept.id)
    unkept = client.responses.create(model="bytes", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="bytes", input="x", previous_response_id=unkept.id)


def test_a_message_is_streamed_with_its_call(server, messages):
    server.house.engine.script = Script(answer=CALL, tokens_per_step=4, hits={"hit_host": 3})
    asked = {"model": "bytes", "max_tokens": 200, "messages": MESSAGES}
    with messages.stream(**asked, tools=[{"name": "weather", "input_schema": SCHEMA}]) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    text, call = message.content
    assert ("I look.", "weather", {"city": "Rome"}) == (text.text, call.name, call.input)
    assert "tool_use" == message.stop_reason
    told = (message.usage.input_tokens, message.usage.cache_read_input_tokens)
    assert (PROMPT_TOKENS - 3 + len("tools: 1\n"), 3) == told
    assert kinds.count("input_json") > 1


def test_a_time_out_is_retried_and_named_a_retry(server):
    server.house.engine.script = Script(stall=True)
    with (
        openai.OpenAI(
            base_url=server.url, api_key="sk-any", max_retries=1, timeout=0.3
        ) as impatient,
        pytest.raises(openai.APITimeoutError),
    ):
        impatient.chat.completions.create(model="bytes", messages=MESSAGES)
    contexts = [charge.job.context for charge in server.house.meter.charges]
    assert [False, True] == [context.is_retry for context in contexts]
    assert 1 == len({context.fingerprint for context in contexts})


class Person(BaseModel):
    full_name: str
    age_in_years: int = Field(ge=0, le=150)
    favourite_colour: Literal["red", "green", "blue"]


@pytest.mark.e2e
def test_the_parse_helper_reads_a_pydantic_model(default_server):
    """`chat.completions.parse` sends the model's schema; two samples."""
    messages = [{"role": "user", "content": "Bob Smith is 42 and likes blue. Who is he?"}]
    with openai.OpenAI(base_url=f"{default_server}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "smollm2-135m", "messages": messages, "n": 2, "seed": 3}
        answer = client.chat.completions.parse(
            **asked, response_format=Person, max_tokens=120, extra_body=DETAILS
        )
        assert all(isinstance(choice.message.parsed, Person) for choice in answer.choices)
        assert {"stop"} == {choice.finish_reason for choice in answer.choices}
        assert answer.model_extra["cachesvc"]["jumped_tokens"] >= 2 * 10


@pytest.mark.e2e
def test_the_next_turn_of_a_chat_computes_what_is_new(default_server):
    """Three turns; each computes its own tokens, and of the last answer the one never computed."""
    messages = [{"role": "user", "content": "Name three rivers of Europe, and say where each is."}]
    prompt = completion = 0
    with openai.OpenAI(base_url=f"{default_server}/v1", api_key="none", max_retries=0) as client:
        for question in ("Which of them is the longest?", "And the shortest?", "Thank you!"):
            asked = {"model": "smollm2-135m", "messages": messages, "max_tokens": 40}
            answer = client.chat.completions.create(**asked, temperature=0, extra_body=DETAILS)
            usage, details = answer.usage, answer.model_extra["cachesvc"]
            assert usage is not None
            assert "diverged_at_token" not in details
            if prompt:
                stood = prompt + completion - 1  # the last token of an answer is not computed
                assert usage.prompt_tokens - stood == usage.model_extra["prompt_cache_miss_tokens"]
            prompt, completion = usage.prompt_tokens, usage.completion_tokens
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": question},
            ]

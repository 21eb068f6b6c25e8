"""The official openai client against a server on a socket: what it reads, raises and retries.

The server is uvicorn as `cachesvc serve` runs it, over the scripted engine, in a thread of its own;
once it is the real program with the default model.
"""

from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from billing.gate.work import insufficient_balance
from tests.support.wire import Script

MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT_TOKENS = len("user: hi\nassistant: ")


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="sk-any", max_retries=0) as client:
        yield client


def test_a_stream_with_usage(server, client):
    """By hand, and by the client's helper, which builds the whole message of it."""
    server.house.engine.script = Script(answer="one two three")
    stream = client.chat.completions.create(
        model="bytes", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "one two three" == text
    assert "assistant" == chunks[0].choices[0].delta.role
    assert PROMPT_TOKENS + 14 == chunks[-1].usage.total_tokens
    with client.chat.completions.stream(model="bytes", messages=MESSAGES) as helped:
        (choice,) = helped.get_final_completion().choices
    assert ("one two three", "stop") == (choice.message.content, choice.finish_reason)


def test_errors_are_the_clients_own(server, client):
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-9", messages=MESSAGES)
    assert ("model_not_found", "model") == (missing.value.code, missing.value.param)
    with pytest.raises(openai.BadRequestError) as wrong:
        create(model="bytes", messages=MESSAGES, temperature=3)
    assert "temperature" == wrong.value.param
    with pytest.raises(openai.BadRequestError) as too_long:
        create(model="bytes", messages=[{"role": "user", "content": "x" * 9000}])
    assert "context_length_exceeded" == too_long.value.code
    server.house.meter.refuse = insufficient_balance("t", needed=2, available=1, currency="CNY")
    with pytest.raises(openai.APIStatusError) as poor:
        create(model="bytes", messages=MESSAGES)
    assert (402, "insufficient_balance") == (poor.value.status_code, poor.value.code)
    server.house.meter.refuse = None
    server.house.engine.script = Script(fail_after=0)
    with pytest.raises(openai.InternalServerError):
        create(model="bytes", messages=MESSAGES)


def test_an_error_in_a_stream_is_raised(server, client):
    server.house.engine.script = Script(answer="x" * 50, fail_after=3, step_s=0.005)
    stream = client.chat.completions.create(model="bytes", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="on fire"):
        list(stream)


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
    """`chat.completions.parse` sends the model's schema; two samples, and a streamed one."""
    messages = [{"role": "user", "content": "Bob Smith is 42 and likes blue. Who is he?"}]
    with openai.OpenAI(base_url=f"{default_server}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.parse(
            model="smollm2-135m",
            messages=messages,
            response_format=Person,
            n=2,
            seed=3,
            max_tokens=120,
            extra_body={"cachesvc": {"details": True}},
        )
        assert all(isinstance(choice.message.parsed, Person) for choice in answer.choices)
        assert {"stop"} == {choice.finish_reason for choice in answer.choices}
        assert answer.model_extra["cachesvc"]["jumped_tokens"] >= 2 * 10
        with client.chat.completions.stream(
            model="smollm2-135m", messages=messages, response_format=Person, max_tokens=120
        ) as stream:
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
        chosen = client.completions.create(
            model="smollm2-135m",
            prompt="The sky is",
            extra_body={"structured_outputs": {"choice": ["blue", "green"]}},
        )
        assert chosen.choices[0].text in ("blue", "green")
        with pytest.raises(openai.BadRequestError) as wrong:
            client.chat.completions.create(
                model="smollm2-135m",
                messages=messages,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "strin"}},
                },
            )
        assert "response_format.json_schema.schema" == wrong.value.param


@pytest.mark.e2e
def test_the_next_turn_of_a_chat_computes_what_is_new(default_server):
    """Three turns; each computes its own tokens, and of the last answer the one never computed."""
    messages = [{"role": "user", "content": "Name three rivers of Europe, and say where each is."}]
    prompt = completion = 0
    with openai.OpenAI(base_url=f"{default_server}/v1", api_key="none", max_retries=0) as client:
        for question in ("Which of them is the longest?", "And the shortest?", "Thank you!"):
            answer = client.chat.completions.create(
                model="smollm2-135m",
                messages=messages,
                temperature=0,
                max_tokens=40,
                extra_body={"cachesvc": {"details": True}},
            )
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

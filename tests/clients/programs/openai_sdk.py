"""The openai client: chat completions and Responses."""

import json
from functools import partial
from typing import Literal

import openai
from cells import ABOUT, ASKED, MODEL, QUESTION, SCHEMA, SPENT, TOOL, URL, cell, main, table, told
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=300)
FLAT_TOOL = {"type": "function", **ABOUT, "parameters": SCHEMA, "strict": True}
GREEDY = {"model": MODEL, "temperature": 0}


class Place(BaseModel):
    city: Literal["rome", "paris"]
    nights: int = Field(ge=1, le=9)


@cell
def chat_answer():
    answer, again = (
        client.chat.completions.create(messages=ASKED, max_tokens=16, **GREEDY) for _ in range(2)
    )
    assert "Paris" in answer.choices[0].message.content
    details = again.usage.prompt_tokens_details
    cached = details.cached_tokens
    assert cached == again.usage.prompt_tokens - 1 and details.cache_write_tokens == 0
    return f"{cached} of {again.usage.prompt_tokens} prompt tokens hit when asked again"


@cell
def chat_stream():
    asked = {"max_tokens": 16, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=ASKED, **asked, **GREEDY))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text and chunks[-1].usage.completion_tokens > 0
    return f"{len(chunks)} chunks"


@cell
def chat_tools():
    asked = [{"role": "user", "content": "Is it warm in Paris?"}]
    forced = {"tools": [TOOL], "max_tokens": 60, **GREEDY}
    with client.chat.completions.stream(messages=asked, tool_choice="required", **forced) as stream:
        message = stream.get_final_completion().choices[0].message
    [call] = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("rome", "paris")
    result = {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
    final = client.chat.completions.create(
        messages=[*asked, message, result], tool_choice="none", **forced
    )
    assert final.choices[0].message.content
    return f"{call.function.name}({call.function.arguments}), streamed; an answer to its result"


@cell
def chat_structured():
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASKED, response_format=Place, max_tokens=40
    )
    assert isinstance(answer.choices[0].message.parsed, Place)
    return answer.choices[0].message.content


def limit(create):
    try:
        create(model=MODEL, user=SPENT)
    except openai.RateLimitError as error:
        return told(error.body["limit"], error.code, error.response.headers)
    raise AssertionError("it was not refused")


table(
    {
        "chat": partial(client.chat.completions.create, messages=ASKED, max_tokens=8),
        "responses": partial(client.responses.create, input=QUESTION, max_output_tokens=16),
    },
    limit=limit,
)


@cell
def responses_answer():
    asked = {"max_output_tokens": 16, **GREEDY}
    first = client.responses.create(input=QUESTION, **asked)
    assert "Paris" in first.output_text
    second = client.responses.create(input="And of Italy?", previous_response_id=first.id, **asked)
    stood = first.usage.input_tokens + first.usage.output_tokens - 1
    assert second.usage.input_tokens_details.cached_tokens >= stood
    return f"previous_response_id: all {stood} tokens of the last turn hit"


@cell
def responses_stream():
    with client.responses.stream(input=QUESTION, max_output_tokens=16, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "Paris" in final.output_text and "response.output_text.delta" in kinds
    return f"{len(kinds)} kinds of events"


@cell
def responses_tools():
    asked = {"tools": [FLAT_TOOL], "max_output_tokens": 60, **GREEDY}
    first = client.responses.create(input="Is it warm in Paris?", tool_choice="required", **asked)
    [call] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("rome", "paris")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
    second = client.responses.create(
        input=[result], previous_response_id=first.id, tool_choice="none", **asked
    )
    assert second.output_text
    return f"{call.name}({call.arguments}); an answer to its result"


@cell
def responses_structured():
    answer = client.responses.parse(
        model=MODEL, input=QUESTION, text_format=Place, max_output_tokens=40
    )
    assert isinstance(answer.output_parsed, Place)
    return answer.output_text


if __name__ == "__main__":
    main("openai")

"""The anthropic client."""

import uuid

import anthropic
from cells import ABOUT, ASKED, MODEL, SCHEMA, SPENT, URL, cell, main, told
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=URL, api_key="any", max_retries=0, timeout=300)
GREEDY = {"extra_body": {"temperature": 0}}  # the client no longer names the field
TOOL = {**ABOUT, "input_schema": SCHEMA}
RULES = f"These are the rules of {uuid.uuid4()}. " + " ".join(
    f"Rule {number}: be brief about subject {number}." for number in range(30)
)


class Place(BaseModel):
    city: str
    warm: bool


@cell
def messages_answer():
    message = client.messages.create(model=MODEL, max_tokens=16, messages=ASKED, **GREEDY)
    assert "Paris" in message.content[0].text
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED)
    usage = message.usage
    read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    assert counted.input_tokens == usage.input_tokens + read + written
    return f"count_tokens says {counted.input_tokens}, and so does the usage"


@cell
def messages_stream():
    with client.messages.stream(model=MODEL, max_tokens=16, messages=ASKED, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "Paris" in text and final.usage.output_tokens > 0
    return f"{final.usage.output_tokens} tokens, {final.stop_reason}"


@cell
def messages_tools():
    asked = [{"role": "user", "content": "Is it warm in Paris?"}]
    given = {"model": MODEL, "max_tokens": 60, "tools": [TOOL], **GREEDY}
    with client.messages.stream(messages=asked, tool_choice={"type": "any"}, **given) as stream:
        first = stream.get_final_message()
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert call.input["city"] in ("rome", "paris") and first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "20 degrees"}
    turns = [
        *asked,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(messages=turns, tool_choice={"type": "none"}, **given)
    assert second.content[0].text
    return f"{call.name}({call.input}), streamed; an answer to its result"


@cell
def messages_structured():
    answer = client.messages.parse(
        model=MODEL, max_tokens=60, messages=ASKED, output_format=Place, **GREEDY
    )
    assert isinstance(answer.parsed_output, Place)
    return answer.parsed_output.model_dump_json()


@cell
def messages_cache():
    kept = {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    asked = {"model": MODEL, "max_tokens": 4, "system": [kept], "messages": ASKED}
    first, second = client.messages.create(**asked), client.messages.create(**asked)
    assert first.usage.cache_creation.ephemeral_1h_input_tokens > 0
    assert second.usage.cache_read_input_tokens > first.usage.cache_creation_input_tokens - 64
    return (
        f"{first.usage.cache_creation_input_tokens} tokens written for an hour, then "
        f"{second.usage.cache_read_input_tokens} read"
    )


@cell
def messages_limit():
    try:
        client.messages.create(
            model=MODEL, max_tokens=4, messages=ASKED, metadata={"user_id": SPENT}
        )
    except anthropic.RateLimitError as error:
        body = error.body["error"]
        return told(body["limit"], body["code"], error.response.headers)
    raise AssertionError("it was not refused")


if __name__ == "__main__":
    main("anthropic")

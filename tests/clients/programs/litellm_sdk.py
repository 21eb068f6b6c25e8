"""litellm as a library: its `openai/` provider on chat, Responses and Messages."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # fetches nothing

import litellm
from cells import ASKED, MODEL, QUESTION, SCHEMA, SPENT, TOOL, URL, cell, main, rules

litellm.suppress_debug_info = True
TO = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "any", "timeout": 300}


@cell
def chat_answer():
    answer = litellm.completion(messages=ASKED, temperature=0, max_tokens=16, **TO)
    assert "Paris" in answer.choices[0].message.content
    return answer.choices[0].message.content


def told(error):
    """What the client knows of the limit: its `body`, or else the text that it raises with."""
    assert error.status_code == 429
    text = str(error)
    body = error.body or json.loads(text[text.index("{") :])["error"]
    limit = body["limit"]
    assert body["code"] == "spend_limit_reached" and limit["value"] == SPENT
    where = "body" if error.body else "message"
    return f"{body['code']} in its {where}: {limit['name']} until {limit['ends_at']}"


@cell
def chat_usage():
    asked = {"messages": [{"role": "system", "content": rules()}, *ASKED], "temperature": 0}
    first = litellm.completion(max_tokens=8, **asked, **TO).usage.prompt_tokens_details
    usage = litellm.completion(max_tokens=8, **asked, **TO).usage
    second = usage.prompt_tokens_details
    assert first.cache_write_tokens >= 64 and second.cache_write_tokens == 0
    assert second.cached_tokens == usage.prompt_tokens - 1
    return f"{first.cache_write_tokens} tokens written, then {second.cached_tokens} read"


@cell
def chat_limit():
    try:
        user = {"user": SPENT}  # of itself litellm sends it only for models that it knows
        litellm.completion(messages=ASKED, max_tokens=8, extra_body=user, max_retries=0, **TO)
    except litellm.RateLimitError as error:
        return told(error)
    raise AssertionError("it was not refused")


@cell
def chat_stream():
    chunks = list(
        litellm.completion(
            messages=ASKED,
            temperature=0,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
            **TO,
        )
    )
    assert "Paris" in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return f"{len(chunks)} chunks"


@cell
def chat_tools():
    asked = [{"role": "user", "content": "Is it warm in Paris?"}]
    given = {"tools": [TOOL], "temperature": 0, "max_tokens": 60, **TO}
    message = litellm.completion(messages=asked, tool_choice="required", **given).choices[0].message
    [call] = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("rome", "paris")
    result = {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
    final = litellm.completion(
        messages=[*asked, message.model_dump(), result], tool_choice="none", **given
    )
    assert final.choices[0].message.content
    return f"{call.function.name}({call.function.arguments}); an answer to its result"


@cell
def chat_structured():
    form = {
        "type": "json_schema",
        "json_schema": {"name": "place", "schema": SCHEMA, "strict": True},
    }
    answer = litellm.completion(messages=ASKED, response_format=form, max_tokens=40, **TO)
    return json.loads(answer.choices[0].message.content)


@cell
def responses_answer():
    answer = litellm.responses(input=QUESTION, temperature=0, max_output_tokens=16, **TO)
    assert "Paris" in answer.output[0].content[0].text
    return answer.status


@cell
def responses_usage():
    asked = {"input": QUESTION, "instructions": rules(), "temperature": 0, "max_output_tokens": 8}
    first = litellm.responses(**asked, **TO).usage.input_tokens_details
    usage = litellm.responses(**asked, **TO).usage
    second = usage.input_tokens_details
    assert first.cache_write_tokens >= 64 and second.cache_write_tokens == 0
    assert second.cached_tokens == usage.input_tokens - 1
    return f"{first.cache_write_tokens} tokens written, then {second.cached_tokens} read"


@cell
def responses_limit():
    try:
        litellm.responses(input=QUESTION, max_output_tokens=8, user=SPENT, max_retries=0, **TO)
    except litellm.RateLimitError as error:
        return told(error)
    raise AssertionError("it was not refused")


TO_MESSAGES = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "any"}


@cell
async def messages_limit():
    try:
        await litellm.anthropic_messages(
            messages=ASKED, max_tokens=8, metadata={"user_id": SPENT}, **TO_MESSAGES
        )
    except litellm.RateLimitError as error:
        return told(error)
    raise AssertionError("it was not refused")


@cell
async def messages_answer():
    answer = await litellm.anthropic_messages(
        messages=ASKED, max_tokens=16, temperature=0, **TO_MESSAGES
    )
    assert "Paris" in answer["content"][0]["text"]
    return answer["usage"]


if __name__ == "__main__":
    main("litellm")

"""litellm as a library: its `openai/` provider on chat, Responses and Messages."""

import json
import os
from functools import partial

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # fetches nothing

import litellm
from cells import ASKED, MODEL, QUESTION, SCHEMA, SPENT, TOOL, URL, cell, main, rules, table

litellm.suppress_debug_info = True
TO = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "any", "timeout": 300}
TO_MESSAGES = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "any"}
chat = partial(litellm.completion, **TO)
responses = partial(litellm.responses, **TO)
messages = partial(litellm.anthropic_messages, messages=ASKED, **TO_MESSAGES)


@cell
def chat_answer():
    answer = chat(messages=ASKED, temperature=0, max_tokens=16)
    assert "Paris" in answer.choices[0].message.content
    return answer.choices[0].message.content


@cell
def chat_stream():
    asked = {"messages": ASKED, "temperature": 0, "max_tokens": 16}
    chunks = list(chat(stream=True, stream_options={"include_usage": True}, **asked))
    assert "Paris" in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return f"{len(chunks)} chunks"


@cell
def chat_tools():
    asked = [{"role": "user", "content": "Is it warm in Paris?"}]
    given = {"tools": [TOOL], "temperature": 0, "max_tokens": 60}
    message = chat(messages=asked, tool_choice="required", **given).choices[0].message
    [call] = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("rome", "paris")
    result = {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
    final = chat(messages=[*asked, message.model_dump(), result], tool_choice="none", **given)
    assert final.choices[0].message.content
    return f"{call.function.name}({call.function.arguments}); an answer to its result"


@cell
def chat_structured():
    schema = {"name": "place", "schema": SCHEMA, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    answer = chat(messages=ASKED, response_format=form, max_tokens=40)
    return json.loads(answer.choices[0].message.content)


@cell
def responses_answer():
    answer = responses(input=QUESTION, temperature=0, max_output_tokens=16)
    assert "Paris" in answer.output[0].content[0].text
    return answer.status


@cell
async def messages_answer():
    answer = await messages(max_tokens=16, temperature=0)
    assert "Paris" in answer["content"][0]["text"]
    return answer["usage"]


def usage(ask):
    """What a first and a second answer say of the cache."""
    given = ask(rules())
    first, again = given().usage, given().usage
    wrote, read = (
        getattr(each, "prompt_tokens_details", None) or each.input_tokens_details
        for each in (first, again)
    )
    assert wrote.cache_write_tokens >= 64 and read.cache_write_tokens == 0
    tokens = getattr(again, "prompt_tokens", None) or again.input_tokens
    assert read.cached_tokens == tokens - 1
    return f"{wrote.cache_write_tokens} tokens written, then {read.cached_tokens} read"


def told(error):
    """What the client knows of the limit: its `body`, or else the text that it raises with."""
    assert error.status_code == 429
    text = str(error)
    body = error.body or json.loads(text[text.index("{") :])["error"]
    limit = body["limit"]
    assert body["code"] == "spend_limit_reached" and limit["value"] == SPENT
    where = "body" if error.body else "message"
    return f"{body['code']} in its {where}: {limit['name']} until {limit['ends_at']}"


async def limit(ask):
    try:
        answer = ask()
        await answer  # of Messages alone
    except litellm.RateLimitError as error:
        return told(error)
    raise AssertionError("it was not refused")


def chat_under(system):
    asked = [{"role": "system", "content": system}, *ASKED]
    return partial(chat, messages=asked, temperature=0, max_tokens=8)


def response_under(system):
    given = {"input": QUESTION, "temperature": 0, "max_output_tokens": 8}
    return partial(responses, instructions=system, **given)


# Of itself litellm sends a user only for models that it knows.
SPENT_OUT = {
    "chat": partial(chat, messages=ASKED, max_tokens=8, extra_body={"user": SPENT}, max_retries=0),
    "responses": partial(responses, input=QUESTION, max_output_tokens=8, user=SPENT, max_retries=0),
    "messages": partial(messages, max_tokens=8, metadata={"user_id": SPENT}),
}
table({"chat": chat_under, "responses": response_under}, usage=usage)
table(SPENT_OUT, limit=limit)

if __name__ == "__main__":
    main("litellm")

"""langchain-openai: chat completions and Responses."""

from typing import Literal

import openai
from cells import MODEL, QUESTION, SPENT, URL, cell, main, rules, table, told
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Place(BaseModel):
    """Where to go."""

    city: Literal["rome", "paris"]


def model(fields, max_tokens=60):
    usual = {"api_key": "any", "temperature": 0, "max_retries": 0, "timeout": 300}
    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", max_tokens=max_tokens, **usual, **fields)


def said(fields):
    answer = model(fields, 16).invoke(QUESTION)
    assert "Paris" in answer.text
    return answer.text


def streamed(fields):
    chunks = list(model(fields, 16).stream(QUESTION))
    assert "Paris" in "".join(chunk.text for chunk in chunks)
    return f"{len(chunks)} chunks"


def called(fields):
    chosen, asked = model(fields), HumanMessage("Which city is warmer?")
    first, *others = chosen.bind_tools([Place], tool_choice="any").stream([asked])
    for chunk in others:
        first = first + chunk
    [call] = first.tool_calls
    assert call["name"] == "Place" and call["args"]["city"] in ("rome", "paris")
    result = ToolMessage("noted", tool_call_id=call["id"])
    answer = chosen.bind_tools([Place], tool_choice="none").invoke([asked, first, result])
    assert answer.text
    return f"{call['name']}({call['args']}), streamed; an answer to its result"


def usage(fields):
    """What a first and a second answer say of the cache."""
    chosen = model(fields, 16)
    asked = [SystemMessage(rules()), HumanMessage(QUESTION)]
    first, second = chosen.invoke(asked), chosen.invoke(asked)
    assert first.text == second.text
    wrote = first.usage_metadata["input_token_details"]
    read = second.usage_metadata["input_token_details"]
    assert wrote["cache_creation"] >= 64 and read["cache_creation"] == 0
    assert read["cache_read"] == second.usage_metadata["input_tokens"] - 1
    return f"{wrote['cache_creation']} tokens written, then {read['cache_read']} read"


def limit(fields):
    try:
        model(fields).invoke(QUESTION, user=SPENT)
    except openai.RateLimitError as error:
        return told(error.body["limit"], error.code, error.response.headers)
    raise AssertionError("it was not refused")


@cell
def chat_structured():
    for method in ("function_calling", "json_schema"):
        chain = model({}).with_structured_output(Place, method=method)
        assert isinstance(chain.invoke("Which city is warmer?"), Place)
    return "by function_calling and by json_schema"


BY = {"chat": {"stream_usage": True}, "responses": {"use_responses_api": True}}
table(BY, answer=said, stream=streamed, tools=called, usage=usage, limit=limit)

if __name__ == "__main__":
    main("langchain-openai", "langchain-core")

"""litellm's proxy before the server, asked by httpx as any OpenAI client would ask it."""

import json

import httpx
from cells import ASKED, MODEL, QUESTION, SPENT, TOOL, URL, cell, main

CHAT = "/v1/chat/completions"


def posted(path, status=200, **body):
    given = {"model": MODEL, "temperature": 0, **body}
    answer = httpx.post(f"{URL}{path}", json=given, timeout=300)
    assert answer.status_code == status, answer.text
    return answer


@cell
def chat_answer():
    answer = posted(CHAT, messages=ASKED, max_tokens=16).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@cell
def chat_limit():
    answer = posted(CHAT, status=429, messages=ASKED, max_tokens=8, user_id=SPENT)
    error = answer.json()["error"]  # the proxy's own, around the message of the server
    assert "spend limit 'cap'" in error["message"] and "the limit ends at" in error["message"]
    return error["message"]


@cell
def chat_stream():
    text = posted(CHAT, messages=ASKED, max_tokens=16, stream=True).text
    assert text.rstrip().endswith("data: [DONE]")
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    said = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert "Paris" in said
    return f"{len(chunks)} chunks"


@cell
def chat_tools():
    forced = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    answer = posted(CHAT, messages=ASKED, **forced).json()
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("rome", "paris")
    return call["function"]


@cell
def responses_answer():
    answer = posted("/v1/responses", input=QUESTION, max_output_tokens=16).json()
    assert "Paris" in answer["output"][0]["content"][0]["text"]
    return answer["status"]


@cell
def messages_answer():
    answer = posted("/v1/messages", messages=ASKED, max_tokens=16).json()
    assert "Paris" in answer["content"][0]["text"]
    return answer["usage"]


if __name__ == "__main__":
    main("litellm")

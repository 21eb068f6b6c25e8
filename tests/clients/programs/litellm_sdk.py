"""litellm as a library: its `openai/` provider on chat, Responses and Messages."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # fetches nothing

import litellm
from cells import MODEL, QUESTION, URL, cell, main

litellm.suppress_debug_info = True
ASKED = [{"role": "user", "content": QUESTION}]
TO = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "any", "timeout": 300}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["rome", "paris"]}},
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA},
}


@cell
def chat_answer():
    answer = litellm.completion(messages=ASKED, temperature=0, max_tokens=16, **TO)
    assert "Paris" in answer.choices[0].message.content
    return f"{answer.usage.prompt_tokens_details.cached_tokens} tokens cached"


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
async def messages_answer():
    to = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "any"}
    answer = await litellm.anthropic_messages(messages=ASKED, max_tokens=16, temperature=0, **to)
    assert "Paris" in answer["content"][0]["text"]
    return answer["usage"]


if __name__ == "__main__":
    main("litellm")

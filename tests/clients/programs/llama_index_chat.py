"""llama-index by its openai-like class, which is made for servers like this."""

from typing import Literal

from cells import MODEL, QUESTION, URL, cell, main
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Place(BaseModel):
    """Where to go."""

    city: Literal["rome", "paris"]


def model(**fields):
    return OpenAILike(
        model=MODEL,
        api_base=f"{URL}/v1",
        api_key="any",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        temperature=0,
        max_tokens=fields.pop("max_tokens", 60),
        max_retries=0,
        timeout=300,
        **fields,
    )


@cell
def chat_answer():
    answer = model(max_tokens=16).chat([ChatMessage(role="user", content=QUESTION)])
    assert "Paris" in answer.message.content
    return f"cached tokens {answer.raw.usage.prompt_tokens_details.cached_tokens}"


@cell
def chat_stream():
    asked = [ChatMessage(role="user", content=QUESTION)]
    parts = [part.delta for part in model(max_tokens=16).stream_chat(asked)]
    assert "Paris" in "".join(part or "" for part in parts)
    return f"{len(parts)} parts"


@cell
def chat_tools():
    seen = []

    def weather(city: Literal["rome", "paris"]) -> str:
        """The weather in a city."""
        seen.append(city)
        return "20 degrees"

    answer = model().predict_and_call(
        [FunctionTool.from_defaults(weather)], user_msg="Is it warm in Paris?", tool_required=True
    )
    assert seen and seen[0] in ("rome", "paris") and "20 degrees" in str(answer)
    return f"weather({seen[0]}) was called"


@cell
def chat_structured():
    found = model().structured_predict(Place, PromptTemplate("Which city is warmer?"))
    assert isinstance(found, Place)
    meant = model(should_use_structured_outputs=True)
    found = meant.structured_predict(Place, PromptTemplate("Which city is warmer?"))
    assert isinstance(found, Place)
    return "by function and by schema"


if __name__ == "__main__":
    main("llama-index-llms-openai-like", "llama-index-core")

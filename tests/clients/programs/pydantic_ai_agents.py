"""pydantic-ai: agents over chat completions, Responses and Messages."""

from typing import Literal

from anthropic import AsyncAnthropic
from cells import MODEL, QUESTION, URL, cell, main
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"temperature": 0, "max_tokens": 60}


class Place(BaseModel):
    """Where to go."""

    city: Literal["rome", "paris"]


def chat_model():
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=300)
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))


def responses_model():
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=300)
    return OpenAIResponsesModel(MODEL, provider=OpenAIProvider(openai_client=client))


def messages_model():
    client = AsyncAnthropic(base_url=URL, api_key="any", max_retries=0, timeout=300)
    return AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))


async def said(model):
    answer = await Agent(model, model_settings=SETTINGS).run(QUESTION)
    assert "Paris" in answer.output
    return str(answer.usage)[:200]


async def streamed(model):
    async with Agent(model, model_settings=SETTINGS).run_stream(QUESTION) as answer:
        parts = [part async for part in answer.stream_text(delta=True, debounce_by=None)]
    assert "Paris" in "".join(parts)
    return f"{len(parts)} parts"


async def decided(model, output):
    answer = await Agent(model, output_type=output, model_settings=SETTINGS).run(
        "Which city is warmer?"
    )
    assert isinstance(answer.output, Place)
    return answer.output.model_dump_json()


@cell
def chat_answer():
    return said(chat_model())


@cell
def chat_stream():
    return streamed(chat_model())


@cell
def chat_tools():
    return decided(chat_model(), Place)


@cell
def chat_structured():
    return decided(chat_model(), NativeOutput(Place))


@cell
def responses_answer():
    return said(responses_model())


@cell
def responses_stream():
    return streamed(responses_model())


@cell
def responses_tools():
    return decided(responses_model(), Place)


@cell
def responses_structured():
    return decided(responses_model(), NativeOutput(Place))


@cell
def messages_answer():
    return said(messages_model())


@cell
def messages_stream():
    return streamed(messages_model())


@cell
def messages_tools():
    return decided(messages_model(), Place)


if __name__ == "__main__":
    main("pydantic-ai-slim", "openai", "anthropic")

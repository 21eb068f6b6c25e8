"""pydantic-ai: agents over chat completions, Responses and Messages."""

from typing import Literal

from anthropic import AsyncAnthropic
from cells import MODEL, QUESTION, URL, main, table
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


openai_client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=300)
openai_provider = OpenAIProvider(openai_client=openai_client)
anthropic_client = AsyncAnthropic(base_url=URL, api_key="any", max_retries=0, timeout=300)
OPENAI = {
    "chat": OpenAIChatModel(MODEL, provider=openai_provider),
    "responses": OpenAIResponsesModel(MODEL, provider=openai_provider),
}
ANTHROPIC = AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=anthropic_client))


async def said(model):
    answer = await Agent(model, model_settings=SETTINGS).run(QUESTION)
    assert "Paris" in answer.output
    return str(answer.usage)[:200]


async def streamed(model):
    async with Agent(model, model_settings=SETTINGS).run_stream(QUESTION) as answer:
        parts = [part async for part in answer.stream_text(delta=True, debounce_by=None)]
    assert "Paris" in "".join(parts)
    return f"{len(parts)} parts"


async def decided(model, output=Place):
    answer = await Agent(model, output_type=output, model_settings=SETTINGS).run(
        "Which city is warmer?"
    )
    assert isinstance(answer.output, Place)
    return answer.output.model_dump_json()


def structured(model):
    return decided(model, NativeOutput(Place))


table(OPENAI | {"messages": ANTHROPIC}, answer=said, stream=streamed, tools=decided)
table(OPENAI, structured=structured)

if __name__ == "__main__":
    main("pydantic-ai-slim", "openai", "anthropic")

"""openai-agents: its loop over Responses, which is its default, and over chat completions."""

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cells import MODEL, QUESTION, URL, main, table
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
SETTINGS = {"temperature": 0, "max_tokens": 300}  # the loop refuses an answer that is cut


class Place(BaseModel):
    """Where to go."""

    city: Literal["rome", "paris"]


def model(kind):
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=300)
    return kind(MODEL, client)


async def said(kind):
    agent = Agent("guide", model=model(kind), model_settings=ModelSettings(**SETTINGS))
    answer = await Runner.run(agent, QUESTION)
    assert "Paris" in answer.final_output
    usage = answer.context_wrapper.usage
    return f"{usage.input_tokens} tokens in, {usage.input_tokens_details.cached_tokens} cached"


async def streamed(kind):
    agent = Agent("guide", model=model(kind), model_settings=ModelSettings(**SETTINGS))
    run = Runner.run_streamed(agent, QUESTION)
    kinds = [event.type async for event in run.stream_events()]
    assert "Paris" in run.final_output
    return f"{len(kinds)} events"


async def called(kind):
    seen = []

    @function_tool
    def weather(city: Literal["rome", "paris"]) -> str:
        """The weather in a city."""
        seen.append(city)
        return "20 degrees"

    agent = Agent(
        "guide",
        model=model(kind),
        tools=[weather],
        model_settings=ModelSettings(tool_choice="required", **SETTINGS),
    )
    answer = await Runner.run(agent, "Is it warm in Paris?", max_turns=4)
    assert seen and seen[0] in ("rome", "paris") and answer.final_output
    return f"weather({seen[0]}) was called, its result answered"


async def decided(kind):
    agent = Agent(
        "guide", model=model(kind), output_type=Place, model_settings=ModelSettings(**SETTINGS)
    )
    answer = await Runner.run(agent, "Which city is warmer?")
    assert isinstance(answer.final_output, Place)
    return answer.final_output.model_dump_json()


table(
    {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel},
    answer=said,
    stream=streamed,
    tools=called,
    structured=decided,
)

if __name__ == "__main__":
    main("openai-agents", "openai")

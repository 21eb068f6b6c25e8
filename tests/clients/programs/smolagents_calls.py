"""smolagents: its model class, and the agent that calls tools."""

from cells import MODEL, QUESTION, SCHEMA, URL, cell, main
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole

SEEN = []


def model(**fields):
    return OpenAIServerModel(
        MODEL, api_base=f"{URL}/v1", api_key="any", temperature=0, max_tokens=80, **fields
    )


def asked(text):
    return [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": text}])]


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    SEEN.append(city)
    return "20 degrees"


@cell
def chat_answer():
    answer = model().generate(asked(QUESTION))
    assert "Paris" in answer.content
    return f"{answer.token_usage.input_tokens} tokens in"


@cell
def chat_stream():
    parts = list(model().generate_stream(asked(QUESTION)))
    assert "Paris" in "".join(part.content or "" for part in parts)
    return f"{len(parts)} parts"


@cell
def chat_tools():
    answer = model().generate(asked("Is it warm in Paris?"), tools_to_call_from=[weather])
    [call] = answer.tool_calls
    assert call.function.name == "weather"
    agent = ToolCallingAgent(tools=[weather], model=model(), max_steps=2, verbosity_level=0)
    agent.run("Is it warm in Paris?")
    steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    assert steps, agent.memory.steps
    names = [call.name for step in steps for call in step.tool_calls]
    assert set(names) <= {"weather", "final_answer"}
    return f"an agent's steps called {', '.join(names)}"


@cell
def chat_structured():
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    answer = model().generate(asked("Which city is warmer?"), response_format=form)
    assert answer.content in ('{"city": "rome"}', '{"city": "paris"}')
    return answer.content


if __name__ == "__main__":
    main("smolagents", "openai")

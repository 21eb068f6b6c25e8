"""instructor over the openai client, in the modes that ask for different fields."""

from typing import Literal

import instructor
import openai
from cells import MODEL, URL, cell, main
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=300)
ASKED = [{"role": "user", "content": "Three nights in Rome, please."}]


class Place(BaseModel):
    """Where to go."""

    city: Literal["rome", "paris"]
    nights: int = Field(ge=1, le=9)


def asked(mode, **fields):
    patched = instructor.from_openai(client, mode=mode)
    found = patched.chat.completions.create(
        model=MODEL, messages=ASKED, response_model=Place, temperature=0, max_retries=0, **fields
    )
    assert isinstance(found, Place)
    return found.model_dump_json()


@cell
def chat_tools():
    return asked(instructor.Mode.TOOLS, max_tokens=80)


@cell
def chat_structured():
    return asked(instructor.Mode.JSON_SCHEMA, max_tokens=80)


@cell
def chat_stream():
    patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    parts = list(
        patched.chat.completions.create_partial(
            model=MODEL, messages=ASKED, response_model=Place, temperature=0, max_tokens=80
        )
    )
    assert parts[-1].city in ("rome", "paris")
    return f"{len(parts)} partial objects"


@cell
def responses_tools():
    return asked(instructor.Mode.RESPONSES_TOOLS, max_output_tokens=80)


if __name__ == "__main__":
    main("instructor", "openai")

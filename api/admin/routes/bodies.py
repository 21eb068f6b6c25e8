"""Bodies of admin routes: the reason of a change, and fields that have fields of their own.

Types are strict and unknown fields are refused.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

Name = Annotated[str, Field(min_length=1, max_length=64)]
Text = Annotated[str, Field(max_length=200)]


class StrictBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class AdminBody(StrictBody):
    why: Annotated[str, Field(min_length=1, max_length=500, description="Kept in the audit log")]

    @field_validator("why")
    @classmethod
    def _says_something(cls, why: str) -> str:
        if not any(map(str.isalnum, why)):
            raise ValueError("say why; the audit log keeps it")
        return why.strip()


class CardSource(StrictBody):
    """A rate card: its TOML, or the name of a built-in or applied card."""

    toml: Annotated[str, Field(max_length=100_000)] | None = None
    name: Name | None = None
    version: Name | None = Field(None, description="Of a card that was applied")


# Arguments of operations that are mappings. Here they get their fields.
FIELDS: Mapping[str, type[BaseModel]] = {"card": CardSource}

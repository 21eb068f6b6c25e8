"""All settings: the sections, and each setting by its name `section.key`."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast, get_args

from pydantic import BeforeValidator, Field, field_validator

from cachesvc.config import sections
from cachesvc.config.places import ENV_PREFIX
from cachesvc.config.sections import ModelSection, ModelTable, Section

ENV_DELIMITER = "__"
MODELS = "models"  # the one setting without a section
_MODEL_KEYS = ModelSection.model_fields.keys()


class Settings(Section):
    """What a server runs with; `cachesvc.config.sources` loads it."""

    models: list[ModelTable] = Field(
        default_factory=list,
        description="Several models on one port: a table [[models]] for each, with the keys of "
        "[model], and engine, key and vllm as in [engine]; the first is the default",
    )
    server: sections.ServerSection = Field(default_factory=sections.ServerSection)
    model: sections.ModelSection = Field(default_factory=sections.ModelSection)
    cache: sections.CacheSection = Field(default_factory=sections.CacheSection)
    engine: sections.EngineSection = Field(default_factory=sections.EngineSection)
    billing: sections.BillingSection = Field(default_factory=sections.BillingSection)
    limits: sections.LimitsSection = Field(default_factory=sections.LimitsSection)
    events: sections.EventsSection = Field(default_factory=sections.EventsSection)
    journal: sections.JournalSection = Field(default_factory=sections.JournalSection)
    log: sections.LogSection = Field(default_factory=sections.LogSection)

    @field_validator("models")
    @classmethod
    def _differ(cls, models: list[ModelTable]) -> list[ModelTable]:
        names = [name for each in models for name in (each.client_name, *each.adapters)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two models are called {twice!r}; give one of them a served_as")
        if sum(each.engine in sections.ENGINES for each in models) > 1:
            raise ValueError(
                "one server has one engine of its own: serve the other models elsewhere, and give "
                "their URLs"
            )
        return models

    def each(self) -> "list[Settings]":
        """Those of one model each, in the order of `models`; these alone without such a table."""
        return [self._only(table) for table in self.models] or [self]

    def _only(self, table: ModelTable) -> "Settings":
        own = {name: getattr(table, name) for name in table.model_fields_set & _MODEL_KEYS}
        names = (("engine", "backend"), ("key", "key"), ("vllm", "vllm"))
        given = table.model_fields_set
        asked = {name: getattr(table, key) for key, name in names if key in given}
        return self.model_copy(
            update={
                "models": [],
                "model": ModelSection.model_validate(own),
                "engine": self.engine.model_copy(update=asked),
            }
        )


def main_of(each: Sequence[Settings]) -> int:
    """The place of the server's own engine among the settings of its models; 0 without one."""
    return next((place for place, one in enumerate(each) if not one.engine.urls), 0)


def known_settings() -> dict[str, str]:
    """Every setting's name and help text, in the order of the sections."""
    return {MODELS: Settings.model_fields[MODELS].description or ""} | {
        f"{section}.{key}": field.description or ""
        for section, section_type in _sections().items()
        for key, field in section_type.model_fields.items()
    }


def parser_of(name: str) -> Callable[..., Any] | None:
    """The parser of a setting's text or of its table's values: `parse_size`, `parse_duration`,
    ..."""
    section, _, key = name.partition(".")
    if not key:
        return None
    field = _sections()[section].model_fields[key]
    inner = (getattr(part, "__metadata__", ()) for part in get_args(field.annotation))
    metadata = [*field.metadata, *chain.from_iterable(inner)]
    return next((each.func for each in metadata if isinstance(each, BeforeValidator)), None)


def env_name(name: str) -> str:
    return ENV_PREFIX + name.upper().replace(".", ENV_DELIMITER)


def _sections() -> dict[str, type[Section]]:
    fields = Settings.model_fields.items()
    return {name: cast(type[Section], each.annotation) for name, each in fields if name != MODELS}

"""All settings: the sections, and each setting by its name `section.key`."""

from collections.abc import Callable
from itertools import chain
from typing import Any, cast, get_args

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from cachesvc.config import sections
from cachesvc.config.places import ENV_PREFIX
from cachesvc.config.sections import Section

ENV_DELIMITER = "__"


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_nested_delimiter=ENV_DELIMITER
    )

    server: sections.ServerSection = Field(default_factory=sections.ServerSection)
    model: sections.ModelSection = Field(default_factory=sections.ModelSection)
    cache: sections.CacheSection = Field(default_factory=sections.CacheSection)
    engine: sections.EngineSection = Field(default_factory=sections.EngineSection)
    billing: sections.BillingSection = Field(default_factory=sections.BillingSection)
    limits: sections.LimitsSection = Field(default_factory=sections.LimitsSection)
    events: sections.EventsSection = Field(default_factory=sections.EventsSection)
    tracing: sections.TracingSection = Field(default_factory=sections.TracingSection)
    journal: sections.JournalSection = Field(default_factory=sections.JournalSection)
    log: sections.LogSection = Field(default_factory=sections.LogSection)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Uses only the values merged by `load_settings`, which tracks their origins."""
        return (init_settings,)


def known_settings() -> dict[str, str]:
    """Every setting's name and help text, in the order of the sections."""
    return {
        f"{section}.{key}": field.description or ""
        for section, section_type in _sections().items()
        for key, field in section_type.model_fields.items()
    }


def parser_of(name: str) -> Callable[..., Any] | None:
    """The parser of a setting's text or of its table's values: `parse_size`, `parse_duration`,
    ..."""
    section, key = name.split(".")
    field = _sections()[section].model_fields[key]
    inner = (getattr(part, "__metadata__", ()) for part in get_args(field.annotation))
    metadata = [*field.metadata, *chain.from_iterable(inner)]
    return next((each.func for each in metadata if isinstance(each, BeforeValidator)), None)


def env_name(name: str) -> str:
    return ENV_PREFIX + name.upper().replace(".", ENV_DELIMITER)


def _sections() -> dict[str, type[Section]]:
    return {name: cast(type[Section], f.annotation) for name, f in Settings.model_fields.items()}

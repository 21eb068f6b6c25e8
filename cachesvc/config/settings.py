"""All settings: the sections, and each setting by its name `section.key`."""

from collections.abc import Callable
from itertools import chain
from typing import Any, get_args

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from cachesvc.config.places import ENV_PREFIX
from cachesvc.config.sections import (
    BillingSection,
    CacheSection,
    CostsSection,
    EngineSection,
    EventsSection,
    JournalSection,
    LimitsSection,
    LogSection,
    ModelSection,
    Section,
    ServerSection,
    TracingSection,
)

ENV_DELIMITER = "__"


class Settings(BaseSettings):
    """All sections."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_nested_delimiter=ENV_DELIMITER
    )

    server: ServerSection = Field(default_factory=ServerSection)
    model: ModelSection = Field(default_factory=ModelSection)
    cache: CacheSection = Field(default_factory=CacheSection)
    engine: EngineSection = Field(default_factory=EngineSection)
    billing: BillingSection = Field(default_factory=BillingSection)
    limits: LimitsSection = Field(default_factory=LimitsSection)
    events: EventsSection = Field(default_factory=EventsSection)
    tracing: TracingSection = Field(default_factory=TracingSection)
    journal: JournalSection = Field(default_factory=JournalSection)
    costs: CostsSection = Field(default_factory=CostsSection)
    log: LogSection = Field(default_factory=LogSection)

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
    """The environment variable that overrides a setting."""
    return ENV_PREFIX + name.upper().replace(".", ENV_DELIMITER)


def _sections() -> dict[str, type[Section]]:
    sections: dict[str, type[Section]] = {}
    for name, field in Settings.model_fields.items():
        assert isinstance(field.annotation, type), name
        assert issubclass(field.annotation, Section), name
        sections[name] = field.annotation
    return sections

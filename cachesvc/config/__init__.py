"""Settings: every value that a user may choose, its meaning, and where the one in force came from.

Flags win over the environment, the environment over the file, the file over the defaults. The only
package that reads the environment.

    sources -> settings -> sections -> places, quantities, vllm
"""

from cachesvc.config.places import default_data_dir, disk_path, models_path, notify_socket
from cachesvc.config.quantities import format_duration, format_size, parse_duration, parse_size
from cachesvc.config.sections import (
    CacheSection,
    CostsSection,
    EngineSection,
    EventsSection,
    JournalSection,
    LimitsSection,
    LogFormat,
    LogSection,
    ModelSection,
    QuotaTable,
    ServerSection,
    TracingSection,
)
from cachesvc.config.settings import Settings, env_name, known_settings, parser_of
from cachesvc.config.sources import ConfigError, Setting, load_settings
from cachesvc.config.vllm import prepare_vllm_environment

__all__ = [
    "CacheSection",
    "ConfigError",
    "CostsSection",
    "EngineSection",
    "EventsSection",
    "JournalSection",
    "LimitsSection",
    "LogFormat",
    "LogSection",
    "ModelSection",
    "QuotaTable",
    "ServerSection",
    "Setting",
    "Settings",
    "TracingSection",
    "default_data_dir",
    "disk_path",
    "env_name",
    "format_duration",
    "format_size",
    "known_settings",
    "load_settings",
    "models_path",
    "notify_socket",
    "parse_duration",
    "parse_size",
    "parser_of",
    "prepare_vllm_environment",
]

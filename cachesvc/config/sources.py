"""Loads settings: flags override the environment, then the file, then the defaults.

Variables follow one rule: `server.port` is `CACHESVC_SERVER__PORT`. Values keep their origin.
Called once, by a command, before any thread starts.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, SettingsError

from api.format import plain
from cachesvc.config.errors import ConfigError, WrongOption
from cachesvc.config.places import ENV_PREFIX
from cachesvc.config.settings import ENV_DELIMITER, MODELS, Settings, env_name, known_settings

_OF_ONE = frozenset({"engine.backend", "engine.key", "engine.vllm"})
FLAG = "flag"  # the origin of an option of the command line
ENV_CONFIG = "CACHESVC_CONFIG"  # names the file, as --config does
SECRETS = frozenset({"engine.key"})  # shown nowhere
_PASSWORD = re.compile(r"(:/{1,2}[^:/@]*:)[^\n]*@")  # also where a slash of the URL is forgotten
_QUERY = re.compile(r"([?&][^=&\s]*(?:key|token|secret|password|sign|cred)[^=&\s]*=)[^&\s]+", re.I)


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    value: Any
    origin: str  # default, flag, env VARIABLE or the file's path
    help: str


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The settings in force, and the origin of each that is not the default."""

    settings: Settings
    origins: Mapping[str, str]

    def rows(self) -> Iterator[Setting]:
        for name, help_text in known_settings().items():
            value = attrgetter(name)(self.settings)
            yield Setting(name, value, self.origins.get(name, "default"), help_text)


def load_settings(
    flags: Mapping[str, Any] | None = None, config_file: Path | None = None
) -> LoadedSettings:
    """Settings from `flags` (by name; None means not given), the environment and the file.

    Raises ConfigError for an unknown key, an unreadable file or an invalid value.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    path = config_file or (Path(os.environ[ENV_CONFIG]) if os.environ.get(ENV_CONFIG) else None)
    layers = [_file_layer(path)] if path else []
    layers.append(_env_layer())
    layers.append({name: (value, FLAG) for name, value in given.items()})
    merged = {name: entry for layer in layers for name, entry in layer.items()}
    origins = {name: origin for name, (_, origin) in merged.items()}
    _refuse_both(origins)
    nested: dict[str, Any] = {}
    for name, (value, _) in merged.items():
        section, _, key = name.partition(".")
        if key:
            nested.setdefault(section, {})[key] = value
        else:
            nested[section] = value
    try:
        return LoadedSettings(Settings.model_validate(nested), origins)
    except ValidationError as error:
        wrong = ".".join(map(str, error.errors()[0]["loc"][:2]))
        kind = WrongOption if origins.get(wrong) == FLAG else ConfigError
        raise kind(_explain(error, origins)) from None


_Layer = dict[str, tuple[Any, str]]


def _refuse_both(origins: Mapping[str, str]) -> None:
    """Refuses settings of the one model beside a list of models."""
    of_one = (name for name in origins if name.startswith("model.") or name in _OF_ONE)
    if MODELS in origins and (name := next(of_one, None)):
        raise ConfigError(
            f"{name} (from {origins[name]}) is of one model, and [[models]] "
            f"(from {origins[MODELS]}) lists several: give it there, to the model that it is for"
        )


REMOVED = {
    "server.system_in_place": "a template that moves system messages decides; take it out, and "
    "send what steers a chat as a user's message",
    **dict.fromkeys(
        ("cache.device_idle_ttl", "cache.host_idle_ttl"),
        "blocks leave memory for room alone; take it out",
    ),
    **dict.fromkeys(
        ("cache.policy", "cache.disk_order"),
        "the block that was not used for longest goes first; take it out",
    ),
    **dict.fromkeys(("admin.idle", "admin.session"), "a login ends after 12h; take it out"),
    "cache.promotion": "the sizes of the tiers decide now, as `auto` did; take it out",
    "cache.partial_blocks": "partly filled blocks are always reused; take it out",
    "cache.perceptual_digests": "every hit is exact; take it out, and send exact digests",
    "cache.write_budget_bytes": 'cache.write_policy = "on_second_hit" writes what is used again; '
    "take it out",
    "cache.readers": "two threads read; take it out",
    "server.max_choices": "a request may have 64 answers; take it out",
    "engine.order": "requests with more cached go first; take it out",
    "engine.max_passed": "no request is passed by for longer than 5s; take it out",
    "engine.jump_forward": "forced tokens are always computed in one step; take it out",
    "engine.grammar_timeout": "a grammar is bounded by its size and its work; take it out",
    "billing.alerts_to": "Prometheus alerts, by the rules in ops/prometheus; take it out",
    "billing.first_card": "apply it before the first start: `cachesvc prices apply CARD`",
    "billing.hold_lease": "a hold is leased for 2 minutes and renewed; take it out",
    "server.replay_turns": "use previous_response_id in /v1/responses instead",
    "server.turn_tokens": "a million tokens of recent turns are kept; take it out",
    "model.threads": "set OMP_NUM_THREADS instead",
    "billing.slice_tokens": "a hold covers 256 output tokens at a time; take it out",
    "metrics.vllm_aliases": "load is always told under vLLM's names too; take it out",
    "events.zmq_keep": "10000 batches are kept for replay; take it out",
    "events.zmq_replay": 'write events.zmq = {endpoint = "...", replay_endpoint = "..."} instead',
    "events.zmq_topic": 'write events.zmq = {endpoint = "...", topic = "..."} instead',
    "events.zmq_format": "events are maps, as vLLM writes them from 0.24 on; take it out",
    "server.write_timeout": "a client that reads nothing for 1m is disconnected; take it out",
    "server.keepalive": "a comment is streamed after 15s of silence; take it out",
    "cache.disk_dirs": "join the disks into one volume, and put server.data_dir there; take it out",
    "server.drop_lines": "Claude Code leaves the line out with CLAUDE_CODE_ATTRIBUTION_HEADER=0",
    "cache.both_ends": "a prefix on disk is loaded whole or computed; take it out",
    "cache.disk_shards": "a new disk tier has two LMDB files; take it out",
    "cache.remote_timeout": "the remote tier has 1s to answer; take it out",
    "cache.pinned_share": "pins may take a quarter of the lowest tier; take it out",
    "cache.tenant_quotas": 'write cache.quotas = {"NAME" = "SIZE"} instead',
    "cache.group_quotas": 'write cache.quotas = {"group:NAME" = "SIZE"} instead',
    "cache.default_quota": 'write cache.quotas = {"*" = "SIZE"} instead',
    "engine.mixed_chunk_tokens": "it is a quarter of engine.chunk_tokens; take it out",
    **dict.fromkeys(
        ("tracing.endpoint", "tracing.sample", "tracing.service_name"),
        "the journal has each request's times and its traceparent; trace in the gateway before it",
    ),
    "journal.bytes": "the journal takes 16MiB at most; take it out",
    **{
        f"limits.{who}{what}": f'write limits.{who}s."*" = {{...}} instead'
        for who in ("tenant", "key")
        for what in ("", "_requests", "_miss_tokens", "_output_tokens", "_concurrency")
    },
    **dict.fromkeys(
        ("costs.gib_month", "costs.currency"),
        "the page of the working set, which compared them with savings, was removed; take it out",
    ),
}


def _file_layer(path: Path) -> _Layer:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} is not valid TOML: {error}") from None
    layer: _Layer = {}
    for section, table in tables.items():
        if isinstance(table, dict):
            given = {f"{section}.{key}": value for key, value in table.items()}
        elif section in Settings.model_fields and section != MODELS:
            raise ConfigError(
                f"{section} in {path} is a section: write [{section}] above its settings"
            )
        else:
            given = {section: table}
        for name, value in given.items():
            if name not in known_settings():
                raise _unknown(name, str(path), known_settings())
            layer[name] = (value, str(path))
    return layer


def check_environment() -> None:
    """Raises ConfigError for a variable that looks like a setting and is none."""
    names = {env_name(name): name for name in known_settings()}
    removed = {env_name(name): name for name in REMOVED}
    for variable in os.environ:
        if variable in removed:
            raise _unknown(removed[variable], f"the environment ({variable})", names)
        if variable.startswith(ENV_PREFIX) and variable not in {*names, ENV_CONFIG}:
            raise _unknown(variable, "the environment", names)


class _Environment(Settings, BaseSettings):
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter=ENV_DELIMITER)


def _env_layer() -> _Layer:
    check_environment()
    try:
        values = EnvSettingsSource(_Environment)()
    except SettingsError as error:
        raise ConfigError(f"{error}: write a setting with several values as JSON") from None
    listed = {MODELS: (values.pop(MODELS), f"env {env_name(MODELS)}")} if MODELS in values else {}
    return listed | {
        f"{section}.{key}": (value, f"env {env_name(f'{section}.{key}')}")
        for section, table in values.items()
        for key, value in table.items()
    }


def _unknown(name: str, origin: str, known: Mapping[str, Any]) -> ConfigError:
    """Says what to use instead of a removed setting, and names the nearest to any other."""
    if name in REMOVED:
        return ConfigError(f"the setting {name} in {origin} was removed: {REMOVED[name]}")
    named = [each for each in known if each.rpartition(".")[2] == name]  # in a section
    near = named or difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else "`cachesvc config show` lists them all"
    return ConfigError(f"unknown setting {name} in {origin}; {hint}")


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    name = ".".join(map(str, error.errors()[0]["loc"][:2]))
    of_it = [each for each in error.errors() if ".".join(map(str, each["loc"][:2])) == name]
    first = max(of_it, key=lambda each: len(each["loc"]))  # of a value that is none of several
    path = first["loc"][2:]
    if first["loc"][0] == MODELS:
        name, path = (
            MODELS,
            tuple(f"table {n + 1}" if type(n) is int else n for n in first["loc"][1:]),
        )
    inside = "".join(f"{part}: " for part in path)
    message = without_passwords(inside + plain(first["msg"]))
    value = f" = {without_passwords(repr(first['input']))}"
    if name in SECRETS or "key" in path:
        value = " = ***"
    if path == () and name == MODELS:  # with all that is in them
        value = ""
    return f"{name}{value} (from {origins.get(name, 'default')}): {message}"


def without_passwords(text: str) -> str:
    """The text with the password of a URL in it masked, all else before the last `@`, and the
    values of its query that are named as secrets are."""
    return _QUERY.sub(r"\1***", _PASSWORD.sub(r"\1***@", text))

"""vLLM's own arguments, from `--vllm.NAME VALUE` or the file, and those set by the server.

They go to the `vllm serve` that the server starts, as they are.
"""

import difflib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from cachesvc.config.errors import ConfigError, WrongOption

# Arguments that would repeat or contradict the server's, and what to use instead.
OURS: Mapping[str, str] = {
    "model": "--model",
    "tokenizer": "the model's own tokenizer",
    "served-model-name": "--model",
    "enable-lora": "--adapter NAME=SOURCE",
    "lora-modules": "--adapter NAME=SOURCE",
    "dtype": "--dtype",
    "kv-transfer-config": "engine.node, which names the node",
    "skip-tokenizer-init": "the model's own tokenizer",
    "structured-outputs-config": "llguidance, which the server sets",
    "host": "--host",
    "port": "--port",
    "uds": "--port",
    "api-key": "cachesvc keys",
}

_REMOVED = {"--disk-cache-dir": "join the disks into one volume, and put --data-dir there"}


def check_installed() -> None:
    """Raises ConfigError without vLLM, which takes seconds to import and is not imported."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--engine vllm needs vLLM in this environment. On a GPU: pip install 'cachesvc[vllm]'; "
            "for its CPU build see docs/vllm.md"
        )


def vllm_flags(given: Mapping[str, Any]) -> list[str]:
    """vLLM's command line for these settings. Raises ConfigError for an argument that the server
    sets."""
    for name in given:
        plain = name.replace("_", "-")
        if plain in OURS:
            raise ConfigError(f"engine.vllm has {name}, which this server sets: use {OURS[plain]}")
    return flags_of(given)


def flags_of(arguments: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        plain = name.replace("_", "-")
        if value is True or value == "":
            flags.append(f"--{plain}")
        elif value is False:
            flags.append(f"--no-{plain}")
        else:
            flags += [f"--{plain}", str(value)]
    return flags


def read_options(rest: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """Settings from `--vllm.NAME VALUE`, `--vllm.NAME=VALUE` and `--vllm.NAME` on a command line.

    Raises WrongOption for anything else, with the nearest of the known `options`.
    """
    found: dict[str, Any] = {}
    left = list(rest)
    while left:
        word = left.pop(0)
        if not word.startswith("--vllm."):
            option = word.partition("=")[0]
            if option in _REMOVED:
                raise WrongOption(f"{option} was removed: {_REMOVED[option]}")
            near = difflib.get_close_matches(option, options, n=1)
            hint = f"did you mean {near[0]}?" if near else "`cachesvc serve --help` lists them all"
            raise WrongOption(f"unexpected argument {word}; {hint}")
        name, equals, value = word.removeprefix("--vllm.").partition("=")
        if not name:
            raise WrongOption("--vllm. needs the name of one of vLLM's arguments after the dot")
        if equals:
            found[name] = value
        elif left and not left[0].startswith("--"):
            found[name] = left.pop(0)
        else:
            found[name] = True
    return found

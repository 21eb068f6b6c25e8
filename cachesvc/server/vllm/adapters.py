"""LoRA adapters for vLLM: folders identified by content, with their ranks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cachesvc.vllm.groups import UnsupportedKv
from cachesvc.vllm.identity import adapter_digest
from engine.errors import AdapterError

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's; the least that holds every adapter is taken


@dataclass(frozen=True, slots=True)
class VllmAdapter:
    """One adapter. `number` is its id in vLLM for the life of the process."""

    number: int
    folder: str
    digest: bytes
    rank: int


def read_adapters(sources: Mapping[str, str]) -> dict[str, VllmAdapter]:
    """Adapters by name. Raises AdapterError for a folder that is not an adapter."""
    return {
        name: _read(name, Path(source).expanduser(), number)
        for number, (name, source) in enumerate(sources.items(), 1)
    }


def max_rank(adapters: Mapping[str, VllmAdapter]) -> int:
    """The rank for which vLLM reserves memory."""
    most = max(adapter.rank for adapter in adapters.values())
    return next((rank for rank in RANKS if rank >= most), most)


def _read(name: str, folder: Path, number: int) -> VllmAdapter:
    try:
        rank = int(json.loads((folder / "adapter_config.json").read_text())["r"])
        digest = adapter_digest(str(folder))
    except (OSError, ValueError, KeyError, TypeError, UnsupportedKv) as error:
        raise AdapterError(
            f"adapter {name}: {folder} does not hold a LoRA adapter for vLLM: {error}"
        ) from None
    return VllmAdapter(number, str(folder), digest, rank)

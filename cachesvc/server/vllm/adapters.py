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
    folder: str
    digest: bytes
    rank: int


def read_adapters(sources: Mapping[str, str]) -> dict[str, VllmAdapter]:
    """Adapters by name. Raises AdapterError for a folder that is not an adapter."""
    return {name: _read(name, Path(source).expanduser()) for name, source in sources.items()}


def max_rank(adapters: Mapping[str, VllmAdapter]) -> int:
    """The rank for which vLLM reserves memory."""
    most = max(adapter.rank for adapter in adapters.values())
    return next((rank for rank in RANKS if rank >= most), most)


def _read(name: str, folder: Path) -> VllmAdapter:
    try:
        rank = int(json.loads((folder / "adapter_config.json").read_text())["r"])
        digest = adapter_digest(str(folder))
    except (OSError, ValueError, KeyError, TypeError, UnsupportedKv) as error:
        raise AdapterError(
            f"adapter {name}: {folder} does not hold a LoRA adapter for vLLM: {error}"
        ) from None
    return VllmAdapter(str(folder), digest, rank)

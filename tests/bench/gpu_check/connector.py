"""What vLLM's connector does to the device, without vLLM: blocks to a node's memory and back.

Layers as vLLM lays them out, a real node, its memory locked for the GPU. A block of 16 tokens of an
8B shape is 2 MiB; adjacent frames are one copy, so the rate should be near a plain pinned copy's.
"""

import tempfile
import threading
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import torch

from tests.bench.gpu_check.device import timed

LEAST_SHARE = 0.7  # of a plain copy's rate in the same run, with the kernel and the node's answers


def check(device: str, small: bool) -> dict[str, Any]:
    from cachesvc.vllm.locked import LockedMemory
    from cachesvc.vllm.slabs import copier_of, slabs_of
    from tiers.node.client import NodeClient
    from tiers.node.messages import engine_layout
    from tiers.node.node import NodeServer
    from tiers.node.settings import NodeSettings

    num_layers, heads, num_blocks = (2, 1, 16) if small else (32, 8, 512)
    layout = engine_layout(num_layers, 2 * heads * 128, 16, "bfloat16")
    shape = (2, num_blocks, 16, heads, 128)
    made = [torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(num_layers)]
    slabs = [slab for layer in made for slab in slabs_of(layer, num_blocks)]
    expected = [slab.clone() for slab in slabs]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node.sock"
        node = NodeServer(NodeSettings(socket=path, host_bytes=2 * num_blocks * layout.nbytes))
        node.open()
        thread = threading.Thread(target=node.run)
        thread.start()
        try:
            with closing(NodeClient(path, layout)) as client:
                client.connect()
                memory = client.memory
                assert memory is not None
                copier = copier_of(slabs, memory.stride)
                where = torch.device(device)
                locked = LockedMemory(path, layout, where) if device == "cuda" else None
                frames, blocks = list(range(num_blocks)), list(range(num_blocks))[::-1]

                def mapped() -> AbstractContextManager[torch.Tensor]:
                    return locked.rows(memory, frames) if locked else nullcontext(memory.rows)

                def save() -> None:
                    with mapped() as rows:
                        copier.save(rows, frames, blocks, memory.piece_frames)

                def load() -> None:
                    with mapped() as rows:
                        copier.load(rows, frames, blocks, memory.piece_frames)

                save()
                for slab in slabs:
                    slab.zero_()
                load()
                wrong = sum(not torch.equal(*pair) for pair in zip(slabs, expected, strict=True))
                locked_bytes = node.stats()["pools"][0]["locked_bytes"]
                seconds = {"save": timed(device, save), "load": timed(device, load)}
                if locked is not None:
                    locked.close()
        finally:
            node.stop()
            thread.join()
            node.close()
    nbytes = num_blocks * layout.nbytes
    plain = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    seconds["plain"] = timed(device, lambda: there.copy_(plain, non_blocking=True))
    share = seconds["plain"] / max(seconds["save"], seconds["load"])
    fast = device != "cuda" or (locked_bytes > 0 and share >= LEAST_SHARE)
    return {
        "what": f"vLLM's blocks through a node, at {LEAST_SHARE} of a plain copy's rate",
        "ok": wrong == 0 and fast,
        "wrong_slabs": wrong,
        "locked_bytes": locked_bytes,
        "gb_per_s": {name: nbytes / each / 1e9 for name, each in seconds.items()},
        "share": share,
    }

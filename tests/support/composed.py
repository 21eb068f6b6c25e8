"""A model with its tiers and engine, composed as the server does it, and asked by one caller."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Self

from engine.composition import compose
from engine.models.load import LoadedModel
from engine.request import Request, SamplingParams, StepOutput
from engine.settings import EngineSettings
from tiers.cache import CacheSettings
from tiers.disk.open import open_disk


class Composed:
    """A started engine. Closing it flushes its blocks to the disk tier in `folder`, if it has
    one."""

    def __init__(
        self,
        loaded: LoadedModel,
        folder: Path,
        *,
        device_bytes: int = 4 << 20,
        host_bytes: int = 4 << 20,
        disk_bytes: int = 0,
    ) -> None:
        layout = loaded.layout()
        self._outputs: SimpleQueue[Sequence[StepOutput]] = SimpleQueue()
        self.core = compose(
            loaded,
            layout,
            self._outputs.put,
            cache=CacheSettings(device_bytes=device_bytes, host_bytes=host_bytes),
            disk=open_disk(folder, layout, disk_bytes) if disk_bytes else None,
            pin_folder=folder,
            engine=EngineSettings(),
        )
        self.core.start()

    def ask(self, tokens: Sequence[int], params: SamplingParams) -> list[int]:
        """One prompt's answer."""
        asked = array("i", tokens)
        self.core.engine.submit(
            Request(request_id="one", tokens=asked, params=params, scope=self.core.scope)
        )
        told: list[StepOutput] = []
        while not told or not told[-1].last:
            told += self._outputs.get()
        return [token for output in told for token in output.tokens]

    def close(self) -> None:
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""A model with its tiers and engine, composed as the server does it, and asked by one caller."""

from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Self

from engine.composition import compose
from engine.models.load import LoadedModel
from engine.request import SamplingParams, StepOutput
from engine.settings import EngineSettings
from tests.support.requests import request
from tiers.cache import CacheSettings
from tiers.disk.open import open_disk


class Composed:
    """A started engine. Closing it flushes its blocks to the disk tier in `folder`, if it has
    one."""

    def __init__(
        self, loaded: LoadedModel, folder: Path, *, device_bytes: int = 4 << 20, disk_bytes: int = 0
    ) -> None:
        layout = loaded.layout()
        self._outputs: SimpleQueue[Sequence[StepOutput]] = SimpleQueue()
        self.core = compose(
            loaded,
            layout,
            self._outputs.put,
            cache=CacheSettings(device_bytes=device_bytes, host_bytes=4 << 20),
            disk=open_disk(folder, layout, disk_bytes) if disk_bytes else None,
            pin_folder=folder,
            engine=EngineSettings(),
        )
        self.core.start()

    def ask(self, tokens: Sequence[int], params: SamplingParams) -> None:
        """One prompt, to the end of its answer."""
        self.core.engine.submit(request(tokens, params=params, scope=self.core.scope))
        while not self._outputs.get()[-1].last:
            pass

    def close(self) -> None:
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""Keeps a model's narrow weights in a file, so that a later start need not find them again.

Loading the default model reads 540 MB of float32 and finds the 106 MiB of bits of which most of it
was made (`engine/operators/linear.h`). A later start reads these instead. It probes the model and
compares products (`engine.models.packing`) as it does with weights that it has just found.
"""

import logging
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from engine.models.files import digest
from engine.models.packing import NarrowLinear
from engine.partial import partial_folder

logger = logging.getLogger(__name__)

_FAMILY = "narrow-"
_WORTH = 2  # it is written if it takes less than one in so many of the checkpoint's bytes
_LEFT_BYTES = 1 << 30  # and if the disk has so much room beside it: the ledger needs some


class NarrowFile:
    """The narrow weights of one checkpoint, in a folder. Its name ends with the digest of its
    contents, so a damaged one is found out."""

    def __init__(self, folder: Path, checkpoint: bytes, key: str, *, replaces_bytes: int) -> None:
        """checkpoint: a digest of its contents. key: of the operators that make and read the
        weights. replaces_bytes: the size of the checkpoint."""
        self._folder = folder
        self._checkpoint = f"{_FAMILY}{checkpoint.hex()}"
        self._name = f"{self._checkpoint}-{key}"
        self._replaces_bytes = replaces_bytes

    def place(self, model: nn.Module) -> bool:
        """Give the linear layers of a model that was just loaded their kept weights. False if there
        are none. The checkpoint's are then not read, where loading only maps them into memory."""
        stored = self._read()
        layers = [(name, each) for name, each in model.named_modules() if name in stored]
        for name, linear in layers:
            if type(linear) is nn.Linear and NarrowLinear.fits(linear, stored[name]):
                # Not a view of the file: a disk that fails later must not end the process.
                model.set_submodule(name, NarrowLinear(linear, stored[name].clone()))
        return bool(stored)

    def write(self, model: nn.Module) -> None:
        """Keep what a model's packed layers have, instead of what other operators kept. A failure
        is logged, and the next start tries again."""
        stored = {
            name: layer.stored
            for name, layer in model.named_modules()
            if isinstance(layer, NarrowLinear)
        }
        num_bytes = sum(each.numel() for each in stored.values())
        if not stored or num_bytes * _WORTH > self._replaces_bytes:
            return
        try:
            if shutil.disk_usage(self._folder).free < num_bytes + _LEFT_BYTES:
                logger.info(
                    "narrow weights are not kept in %s: its disk is nearly full", self._folder
                )
                return
            with partial_folder(self._folder / self._name, _FAMILY) as partial:
                made = partial / "weights"
                save_file(stored, made)
                for old in self._folder.glob(f"{self._checkpoint}-*"):
                    old.unlink(missing_ok=True)
                made.replace(self._folder / f"{self._name}-{digest([made]).hex()}.safetensors")
        except (OSError, SafetensorError) as error:
            logger.warning("narrow weights are not kept, and a start takes longer: %s", error)

    def _read(self) -> dict[str, torch.Tensor]:
        """By the name of the layer. Empty if there is no whole file."""
        for path in self._folder.glob(f"{self._name}-*.safetensors"):
            try:
                if path.stem == f"{self._name}-{digest([path]).hex()}":
                    return load_file(path)
                logger.warning("%s is damaged, and made again", path)
                path.unlink(missing_ok=True)  # a full disk may have no room for both
            except (OSError, SafetensorError) as error:
                logger.warning("%s cannot be read, and is made again: %s", path, error)
        return {}

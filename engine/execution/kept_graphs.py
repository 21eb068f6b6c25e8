"""Keeps a model's recorded forward in a file, so that a later start need not record it again.

The file has the graph without the model's tensors, which a start binds to it. A start compares its
bits with the model's as it does with those of a graph that it has just recorded
(`engine.execution.traced`). A graph can do what a program can, so one that another user could have
written is not read.
"""

import io
import logging
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from torch import nn

from engine.partial import is_own, keeps_others_out, partial_folder
from engine.torchscript import undeprecated

logger = logging.getLogger(__name__)

_FAMILY = "forward-"
_MOST_BYTES = 4 << 20  # a graph of 30 layers takes 60 kB; a larger one has numbers of the model


class KeptGraphs:
    """The recorded forward of one model, in a folder. The name of its file ends with the digest of
    the contents, so a damaged one is found out."""

    def __init__(self, folder: Path, weights: bytes) -> None:
        """weights: a digest of the model's weights and config."""
        self._folder = folder
        self._model = f"{_FAMILY}{weights.hex()}"

    def read(self, model: nn.Module, operators: Collection[str] | None) -> Any | None:
        """The graph with these compiled operators, over the tensors of `model`. None if there is no
        whole file of it."""
        name = self._name(model, operators)
        for path in self._folder.glob(f"{name}-*.pt"):
            try:
                contents = self._contents(path)
                if path.stem == f"{name}-{_digest(contents)}":
                    return _loaded(contents, model)
                logger.warning("%s is damaged, and recorded again", path)
            except (OSError, RuntimeError) as error:
                logger.warning("%s cannot be read, and is recorded again: %s", path, error)
        return None

    def write(self, graph: Any, model: nn.Module, operators: Collection[str] | None) -> None:
        """Keep a graph instead of what other versions kept. A failure is logged, and the next start
        tries again."""
        try:
            contents = _saved(graph)
            if len(contents) > _MOST_BYTES:
                logger.info("the recorded forward is not kept: it takes %d bytes", len(contents))
                return
            name = self._name(model, operators)
            with partial_folder(self._folder / name, _FAMILY) as partial:
                made = partial / "graph"
                made.write_bytes(contents)
                made.chmod(0o600)
                path = self._folder / f"{name}-{_digest(contents)}.pt"
                made.replace(path)
            for other in self._folder.glob(f"{self._model}-*"):
                if other != path:
                    other.unlink()
        except (OSError, RuntimeError) as error:
            logger.warning("the recorded forward is not kept, and a start takes longer: %s", error)

    def _contents(self, path: Path) -> bytes:
        with path.open("rb") as file:
            if not keeps_others_out(self._folder) or not is_own(os.fstat(file.fileno())):
                raise PermissionError("another user could have written it")
            return file.read()

    def _name(self, model: nn.Module, operators: Collection[str] | None) -> str:
        """Of its file, but the digest. It stands for all that the graph depends on: beside the
        model's weights the code, and what its layers are once they are packed."""
        hasher = xxhash.xxh3_64()
        for part in (torch.__version__, transformers.__version__, *_structure(model), operators):
            hasher.update(f"{part}\0".encode())
        for source in _sources(model):
            hasher.update(source.read_bytes() + b"\0")
        return f"{self._model}-{hasher.hexdigest()}"


def numbered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model by the names that they have in its graph."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return {f"tensor_{number}": tensor for number, tensor in enumerate(tensors.values())}


def _sources(model: nn.Module) -> list[Path]:
    """The code of `engine`, and that of the model's modules."""
    modules = {sys.modules[type(each).__module__].__file__ for each in model.modules()}
    own = Path(__file__).parents[1].rglob("*.py")
    return sorted({*own, *(Path(name) for name in modules if name)})


def _structure(model: nn.Module) -> Iterator[str]:
    """Every module and tensor, and each setting that a module has as a plain value."""
    for name, module in model.named_modules():
        yield f"{name} {type(module).__qualname__}"
        for setting, value in sorted(vars(module).items()):
            if isinstance(value, bool | int | float | str | None):
                yield f"{setting} {value!r}"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.layout} {tensor.device}"


def _saved(graph: Any) -> bytes:
    """The file of a graph, without the tensors that it has as attributes."""
    tensors = dict(graph.named_buffers(recurse=False))
    contents = io.BytesIO()
    _bind(graph, dict.fromkeys(tensors, torch.empty(0)))
    try:
        with undeprecated():
            torch.jit.save(graph, contents)
    finally:
        _bind(graph, tensors)
    return contents.getvalue()


def _loaded(contents: bytes, model: nn.Module) -> Any:
    with undeprecated():
        graph = torch.jit.load(io.BytesIO(contents))
    _bind(graph, numbered(model))
    return graph


def _bind(graph: Any, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        setattr(graph, name, tensor)


def _digest(contents: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(contents)

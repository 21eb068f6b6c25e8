"""Reads a GGUF file, or all files of a split one, and knows what of it was used.

`engine.models.gguf` takes fields and tensors out. What is left at the end was not understood, and
refuses the file. On the thread that starts the engine.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError

# Fields that describe the file, and do not change what the model computes.
_DESCRIBES = re.compile(
    r"GGUF\..+|general\.(alignment|author|basename|description|doi|file_type|finetune|languages"
    r"|license(\.name|\.link)?|name|organization|quantization_version|quantized_by|repo_url"
    r"|size_label|source\..+|tags|url|uuid|version|(base_model|dataset)\..+|sampling\..+)"
    r"|quantize\.imatrix\..+|mradermacher\..+"
)
NUMBER = (int, float)  # the kind of a field
_SHOWN = 3  # so many unknown names are listed


class GgufFile:
    """The fields and tensors of a model that nobody has taken yet."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises ModelError if these are not all files of one model."""
        self.path = paths[0]
        self._fields: dict[str, Any] = {}
        self._tensors: dict[str, Any] = {}
        num_tensors = 0
        for number, path in enumerate(paths):
            fields, tensors = _read(path)
            part = fields.pop("split.no", 0), fields.pop("split.count", 0) or 1
            if part != (number, len(paths)):
                raise ModelError(
                    f"{path} says that it is file {part[0] + 1} of {part[1]} of its model; keep "
                    "all of them in one folder, under the names they were given"
                )
            num_tensors = fields.pop("split.tensors.count", 0) or num_tensors
            for name in fields.keys() & self._fields.keys():
                if fields[name] != self._fields[name] and not name.startswith("GGUF."):
                    raise ModelError(f"{path} and {self.path} differ in {name}")
            if twice := sorted(tensors.keys() & self._tensors.keys()):
                raise ModelError(f"{path} has the tensor {twice[0]} again")
            self._fields |= fields
            self._tensors |= tensors
        if num_tensors and num_tensors != len(self._tensors):
            raise self.refusal(f"has {len(self._tensors)} tensors, and says {num_tensors}")

    def refusal(self, why: str) -> ModelError:
        """The error of a file that `why`, in one line."""
        return ModelError(f"{self.path} {' '.join(why.split())}")

    @property
    def num_blocks(self) -> int:
        """The number of layers that have a tensor."""
        found = {re.match(r"blk\.(\d+)\.", name) for name in self._tensors}
        return 1 + max((int(each[1]) for each in found if each), default=-1)

    def has(self, tensor: str) -> bool:
        return tensor in self._tensors

    def has_field(self, key: str) -> bool:
        return key in self._fields

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The field's value, or `default` if there is none. None stands for a field that must be
        there. Raises ModelError if it is missing or of another kind."""
        value = self._fields.pop(key, default)
        if isinstance(value, list) and kind in (int, NUMBER) and len(set(map(str, value))) == 1:
            value = value[0]  # the same for each layer
        if value is None:
            raise self.refusal(f"lacks the field {key}")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind in (int, NUMBER)):
            raise self.refusal(f"has {value!r:.80} in the field {key}, which is of another kind")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.refusal(f"has {value} in the field {key}")
        return value

    def names(self, prefix: str) -> list[str]:
        """The names of the fields that begin with `prefix`."""
        return [name for name in self._fields if name.startswith(prefix)]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The tensor in float32. Raises ModelError if it is missing or has no such form."""
        from gguf import dequantize

        if name not in self._tensors:
            raise self.refusal(f"lacks the tensor {name}; fetch the whole model")
        tensor = self._tensors.pop(name)
        try:
            return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise self.refusal(f"has the tensor {name} in {kind}, which is not served") from None

    def refuse_rest(self, architecture: str) -> None:
        """Raise ModelError, by name, for what was neither taken nor is without effect."""
        fields = [name for name in self._fields if not _DESCRIBES.fullmatch(name)]
        for what, left in (("field", fields), ("tensor", list(self._tensors))):
            if left:
                shown = ", ".join(left[:_SHOWN]) + (", ..." if left[_SHOWN:] else "")
                raise self.refusal(
                    f"has {len(left)} {what}{'s' if left[1:] else ''} not served for "
                    f"{architecture}: {shown}; dropping any could change answers"
                )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """One file's fields and tensors, by name. Raises ModelError if it cannot be read."""
    # Only a GGUF file needs it. Machines that serve safetensors may lack the package.
    from gguf import GGUFReader

    class PlainReader(GGUFReader):  # type: ignore[misc]  # it is untyped
        """Slices plain arrays. From a memory map, each string of a vocabulary takes five times as
        long."""

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = np.asarray(mapped)

    try:
        reader = PlainReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # what a damaged file raises has no common root
        raise ModelError(
            f"{path} is not a readable GGUF file, or not all of one: {' '.join(str(error).split())}"
        ) from error
    if reader.byte_order != "I":
        raise ModelError(f"{path} is in the byte order of another processor")
    return fields, {tensor.name: tensor for tensor in reader.tensors}

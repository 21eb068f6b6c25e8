"""Linear layers with weights in the order in which their kernels read them.

After loading, `engine.models.load` packs a float32 model on a CPU, and a bfloat16 one if the CPU
multiplies bfloat16 itself. A row's result then does not depend on how many rows are computed with
it. The kernels are oneDNN's, or compiled ones for float32 weights that were made of fewer bits, as
those of a quantized file. docs/measurements shows this and the gain.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from engine.torchscript import script

logger = logging.getLogger(__name__)

# The number of rows for which weights are laid out. For this many, oneDNN picks one blocked layout
# that suits 2 rows as well as 2,000 and gives each row the same bits. Laid out for one row, they
# are up to twice as slow for other counts (docs/measurements, "GEMM").
_PACKED_FOR_ROWS = 512

# oneDNN and ideep each cache 1,024 kernels, one per shape and number of rows. Each takes about half
# a megabyte, uncounted: 400 MB after a hundred or so requests of different lengths. Making one
# again takes 0.6 to 0.9 ms (576 by 960 to 3,072, Intel Sapphire Rapids). Both libraries read their
# bound from the environment at first use.
_MAX_KERNELS = 128
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, str(_MAX_KERNELS))  # noqa: TID251  written for them, never read

MIN_ROWS = 2  # with fewer, oneDNN uses kernels that sum in another order
_PANEL_OUTPUTS = _GROUP_INPUTS = 32  # of narrow weights
_COMPARED_ROWS = 5  # of each shape, by both kernels
_OTHER_CHAINS = (512, 2048, 4096, 256, 128, 64)  # lengths that another oneDNN may have
MORE_ROWS = 4  # what a step of fewer rows computes where that takes less time than `MIN_ROWS`


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU. The original weight is not kept.

    Same input and output shapes as `nn.Linear`. With at least `MIN_ROWS` rows, equal rows give
    equal bits, whatever rows are beside them.
    """

    def __init__(self, linear: nn.Linear, packed: torch.Tensor | None = None) -> None:
        """packed: the weight, if it is packed already."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.dtype = linear.weight.dtype
        self._bias = linear.bias
        self._plain: torch.Tensor | None = None  # the weight, once it is requested
        self._packed: torch.Tensor
        if packed is None:
            packed = self._pack(linear.weight.detach())
        self.register_buffer("_packed", packed, persistent=False)
        self._linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default

    @property
    def weight(self) -> torch.Tensor:
        """The weight as in `nn.Linear`, for a model that multiplies by it directly (such as a
        router in float32). Unpacked on first use, and kept."""
        if self._plain is None:
            self._plain = self._unpacked()
        return self._plain

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias as in `nn.Linear`, for a model that adds it itself."""
        return self._bias

    def __dir__(self) -> list[str]:
        """Without the weight: a recorder looks at whatever is listed, and would unpack each."""
        names: list[str] = super().__dir__()  # type: ignore[no-untyped-call]
        return [name for name in names if name not in ("weight", "bias")]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if torch._C._get_tracing_state() is not None:
            recorded: torch.Tensor = script(_multiply)(rows, self._packed, self._bias)
            return recorded
        return self._linear(rows, self._packed, self._bias, "none", [], "")

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        return packed

    def _unpacked(self) -> torch.Tensor:
        return self._packed.to_dense().view(self.out_features, self.in_features)


class PaddedLinear(PackedLinear):
    """The same for layers that may be given a single row, such as those of a recurrent module,
    which is called for each sequence. It is computed as two."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        num_rows = rows.shape[:-1].numel()
        if num_rows >= MIN_ROWS:
            return super().forward(rows)
        padded = rows.reshape(num_rows, -1).expand(MIN_ROWS, -1).contiguous()
        return super().forward(padded)[:num_rows].view(*rows.shape[:-1], -1)


class NarrowLinear(PackedLinear):
    """The same for a float32 weight that was made of fewer bits, and is stored in these
    (`engine/operators/linear.h`). Needs compiled operators. Gives the same bits, for one row too.

    `chain` is the number of inputs whose products are added up in one chain. Raises CannotNarrow
    for any other weight.
    """

    chain = 1024  # as in oneDNN's kernels for AVX2

    @staticmethod
    def fits(linear: nn.Linear, stored: torch.Tensor) -> bool:
        """Whether these bytes store a weight of the layer's shape."""
        _, panels, groups = _head(stored)
        shape = panels * _PANEL_OUTPUTS, groups * _GROUP_INPUTS
        return shape == (linear.out_features, linear.in_features)

    @property
    def stored(self) -> torch.Tensor:
        """The bytes in which the weight is stored."""
        return self._packed

    @property
    def kind(self) -> int:
        """The number of the way in which the operators store it."""
        return _head(self._packed)[0]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows if rows.is_contiguous() else rows.contiguous()
        product: torch.Tensor = torch.ops.cachesvc.linear(
            rows, self._packed, self._bias, self.chain
        )
        return product

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        narrow: torch.Tensor = torch.ops.cachesvc.narrow(weight.contiguous())
        if not narrow.numel():
            raise CannotNarrow
        return narrow

    def _unpacked(self) -> torch.Tensor:
        weight: torch.Tensor = torch.ops.cachesvc.widen(self._packed)
        return weight


def _plain(layer: nn.Linear | NarrowLinear) -> nn.Linear:
    """The layer of which narrow weights were made, again."""
    if isinstance(layer, nn.Linear):
        return layer
    linear = nn.Linear(1, 1, bias=False)  # filling a large one with numbers would take time
    linear.weight = nn.Parameter(torch.ops.cachesvc.widen(layer.stored), requires_grad=False)
    linear.register_parameter("bias", layer.bias)
    linear.in_features, linear.out_features = layer.in_features, layer.out_features
    return linear


def _head(stored: torch.Tensor) -> tuple[int, int, int]:
    """The kind, panels and groups of narrow weights."""
    kind, panels, groups = stored[:24].view(torch.int64).tolist()
    return kind, panels, groups


class CannotNarrow(Exception):
    """A weight has no narrower form, or its products would have other bits."""


class Packing:
    """Chooses how each layer of a model is packed. `narrow` says whether there are compiled
    operators."""

    def __init__(self, *, narrow: bool) -> None:
        self._narrow = narrow
        # By shape, whether there is a bias, and kind. None: oneDNN adds in another order.
        self._chains: dict[tuple[int, int, bool, int], int | None] = {}

    def __call__(self, linear: nn.Linear | NarrowLinear, *, alone: bool) -> PackedLinear:
        """The packed layer. `alone`: it may be given a single row."""
        try:
            return self._narrowed(linear)
        except CannotNarrow:
            return PaddedLinear(_plain(linear)) if alone else PackedLinear(_plain(linear))

    def _narrowed(self, linear: nn.Linear | NarrowLinear) -> NarrowLinear:
        narrow = linear if isinstance(linear, NarrowLinear) else self._found(linear)
        known = narrow.in_features, narrow.out_features, narrow.bias is not None, narrow.kind
        if known not in self._chains:
            self._chains[known] = _find_chain(narrow, PackedLinear(_plain(linear)))
        chain = self._chains[known]
        if chain is None:
            raise CannotNarrow
        narrow.chain = chain
        return narrow

    def _found(self, linear: nn.Linear) -> NarrowLinear:
        if not self._narrow or linear.weight.dtype != torch.float32:
            raise CannotNarrow
        return NarrowLinear(linear)


@torch.inference_mode()
def _find_chain(narrow: NarrowLinear, packed: PackedLinear) -> int | None:
    """The length of chains that gives the bits of the packed layer, as far as a few rows show. None
    if none does of those that oneDNN may have."""
    rows = sample_rows(_COMPARED_ROWS, packed.in_features)
    expected = packed(rows)
    for chain in (NarrowLinear.chain, packed.in_features, *_OTHER_CHAINS):
        narrow.chain = chain
        if torch.equal(narrow(rows), expected):
            return chain
    return None


def sample_rows(num_rows: int, width: int) -> torch.Tensor:
    """Numbers in [-1, 1) that every machine makes alike. [num_rows, width] in float32."""
    whole = torch.arange(num_rows * width) * 7919 % 2048 - 1024
    return (whole.float() / 1024).view(num_rows, width)


def _multiply(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Called by a recorded forward, because the recorder accepts no empty list."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return product


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself (AVX512-BF16, AMX) and torch uses it."""
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return asked is not None and bool(asked())


def can_pack(model: Any) -> bool:
    """Whether this torch build packs weights and the model is one to serve packed."""
    return (
        model.device.type == "cpu"
        and (model.dtype == torch.float32 or (model.dtype == torch.bfloat16 and has_bfloat16()))
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pack(model: nn.Module, alone: Iterable[nn.Module] = (), *, narrow: bool = False) -> int:
    """Replace every `nn.Linear` of `model` by its packed form, and check those that are narrow
    already. Returns how many there were.

    Those within the modules `alone` may be given a single row. `narrow`: there are compiled
    operators, which keep weights in fewer bits where that loses nothing.
    """
    padded = {id(child) for module in alone for child in module.modules()}
    linears = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear or isinstance(child, NarrowLinear)
    ]
    packed = Packing(narrow=narrow)
    with torch.inference_mode():
        for parent, name, linear in linears:
            setattr(parent, name, packed(linear, alone=id(linear) in padded))
    _leave_file(model, sum(each.in_features * each.out_features for _, _, each in linears))
    return len(linears)


@torch.inference_mode()
def fewest_rows(model: nn.Module) -> int:
    """The number of rows that a step of fewer computes, by the time of the largest packed layer.

    With AVX-512, oneDNN's kernel for 4 rows takes 0.7 times as long as the one for 2, as
    measured. With AVX2 it takes longer. No bit depends on the choice. Takes some 50 ms.
    """
    packed = [layer for layer in model.modules() if isinstance(layer, PackedLinear)]
    if not packed:
        return MIN_ROWS
    largest = max(packed, key=lambda layer: layer.in_features * layer.out_features)
    seconds = {MIN_ROWS: math.inf, MORE_ROWS: math.inf}
    for _ in range(5):
        for count in seconds:
            rows = torch.zeros(1, count, largest.in_features, dtype=largest.dtype)
            begin_s = time.perf_counter()
            largest(rows)
            seconds[count] = min(seconds[count], time.perf_counter() - begin_s)
    return MORE_ROWS if seconds[MORE_ROWS] < seconds[MIN_ROWS] else MIN_ROWS


@torch.inference_mode()
def _leave_file(model: nn.Module, num_packed: int) -> None:
    """Copy unpacked weights out of the file, which loading maps into memory.

    Once nothing refers to the file, its pages are freed; they hold a second copy of all packed
    weights. If most weights were not packed (a model of experts), they stay in the file, where they
    cost nothing twice.
    """
    left = list(model.parameters())
    if sum(parameter.numel() for parameter in left) < num_packed:
        for parameter in left:
            parameter.data = parameter.data.clone()

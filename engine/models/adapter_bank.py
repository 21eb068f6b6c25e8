"""Serves several adapters in one model: each row of a step gets its own adapter's update.

    x ─┬─► base linear ───────────────────────► y
       └─► rows of adapter k ─► a ─► b ─► added to their rows of y

A bank wraps the modules that its adapters update. Before a step, `begin` says which rows belong to
which adapter. Rows without an adapter, and models without adapters, get the base model's bits.
Engine thread only, once serving.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from engine.batch import Span
from engine.errors import AdapterError
from engine.models import packing
from engine.models.adapters import Adapter, LowRank, linear_shapes
from engine.models.packing import MIN_ROWS, PackedLinear


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of one adapter in a step: all rows, a run of them, or a list.

    `listed` has at least MIN_ROWS entries. Those from `count` on are padding.
    """

    digest: bytes
    count: int
    run: slice | None = None
    listed: torch.Tensor | None = None


class AdapterRouting:
    """Which rows of the step belong to which adapter. All modules of a bank share it."""

    def __init__(self) -> None:
        self.parts: list[AdapterRows] = []
        self.num_rows = 0
        self.digests: list[bytes | None] = []  # of each sequence, if any has an adapter
        self.pieces: Sequence[int] | None = None  # the sequences that a module computes alone


class Update(nn.Module):
    """A low-rank update as two linear layers, packed if the model's own layers are.

    With packing, a row's bits do not depend on the rows beside it (docs/measurements), so an answer
    is the same alone and in any batch.
    """

    def __init__(self, low_rank: LowRank, *, packed: bool) -> None:
        super().__init__()
        self.down = _linear(low_rank.a, packed)
        self.up = _linear(low_rank.b, packed)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        updated: torch.Tensor = self.up(self.down(rows))
        return updated


class AdaptedLinear(nn.Module):
    """A linear layer and the adapters' updates of it, by digest."""

    def __init__(self, base: nn.Module, routing: AdapterRouting) -> None:
        super().__init__()
        self.base = base
        self.updates: dict[bytes, Update] = {}
        self._routing = routing

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [1, T, in], all rows of the step. Returns [1, T, out]."""
        output: torch.Tensor = self.base(rows)
        if self._routing.pieces is not None:
            self._add_each(output, rows, self._routing.pieces)
            return output
        for part in self._routing.parts:
            update = self.updates.get(part.digest)
            if update is not None:
                self._add(output, rows, part, update)
        return output

    def _add_each(self, output: torch.Tensor, rows: torch.Tensor, pieces: Sequence[int]) -> None:
        """rows: [B, T, in], of B sequences."""
        if not self._routing.parts:
            return
        for place, number in enumerate(pieces):
            update = self.updates.get(self._routing.digests[number] or b"")
            if update is not None:
                own = rows[place]
                padded = own if len(own) >= MIN_ROWS else own.expand(MIN_ROWS, -1)
                output[place] += update(padded)[: len(own)]

    def _add(
        self, output: torch.Tensor, rows: torch.Tensor, part: AdapterRows, update: Update
    ) -> None:
        if rows.shape[:-1] != (1, self._routing.num_rows):
            raise AdapterError(
                f"a layer that it updates was given rows of shape {list(rows.shape)} in a step of "
                f"{self._routing.num_rows} tokens: that layer is not computed for every token"
            )
        if part.listed is not None:
            change = update(rows[0].index_select(0, part.listed))[: part.count]
            output[0].index_add_(0, part.listed[: part.count], change)
        elif part.run is not None:
            output[:, part.run] += update(rows[:, part.run])
        else:
            output += update(rows)


class AdapterBank:
    """The adapters of one model, by name. `digests` is a live view for any thread.

    `shapes` holds the shapes of the layers that an adapter may update.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        self.shapes = linear_shapes(model)
        self._model = model
        self._device = torch.device(device)
        self.routing = self._routing = AdapterRouting()
        self._adapters: dict[str, Adapter] = {}
        self._digests: dict[str, bytes] = {}
        self.digests: Mapping[str, bytes] = MappingProxyType(self._digests)

    def add(self, adapter: Adapter) -> None:
        """Serve `adapter` under its name. It replaces an adapter of the same name.

        No step that uses the name may be under way.
        """
        if adapter.digest not in self._digests.values():
            packed = packing.can_pack(self._model)
            for module_name, low_rank in adapter.updates.items():
                wrapped = self._wrapped(module_name)
                wrapped.updates[adapter.digest] = Update(low_rank, packed=packed)
        replaced = self._adapters.get(adapter.name)
        self._adapters[adapter.name] = adapter
        self._digests[adapter.name] = adapter.digest
        if replaced is not None:
            self._drop_unused(replaced)

    def remove(self, name: str) -> None:
        """Stop serving the adapter of that name. Its memory is freed with its last name."""
        adapter = self._adapters.pop(name)
        del self._digests[name]
        self._drop_unused(adapter)

    def begin(self, spans: Sequence[Span], num_rows: int) -> None:
        """Begin a step with these spans. Their tokens follow one another in `num_rows` rows.

        Rows beyond the spans are padding. Raises AdapterError for a name that is not served.
        """
        self._routing.num_rows = num_rows
        self._routing.parts = []
        if all(span.adapter is None for span in spans):
            return
        runs: dict[bytes | None, list[range]] = {}
        first = 0
        for span in spans:
            end = first + len(span.tokens)
            runs.setdefault(self._digest_of(span), []).append(range(first, end))
            first = end
        self._routing.digests = [self._digest_of(span) for span in spans]
        whole = len(runs) == 1
        self._routing.parts = [
            AdapterRows(digest, num_rows) if whole else self._part(digest, own)
            for digest, own in runs.items()
            if digest is not None
        ]

    @property
    def in_use(self) -> bool:
        """Whether any row of the step has an adapter."""
        return bool(self._routing.parts)

    def finish(self) -> None:
        self._routing.parts = []

    def _digest_of(self, span: Span) -> bytes | None:
        if span.adapter is None:
            return None
        try:
            return self._digests[span.adapter]
        except KeyError:
            raise AdapterError(f"no adapter {span.adapter!r} is loaded") from None

    def _part(self, digest: bytes, own: Iterable[range]) -> AdapterRows:
        listed = [row for run in own for row in run]
        count = len(listed)
        if count >= MIN_ROWS and listed[-1] - listed[0] == count - 1:
            return AdapterRows(digest, count, run=slice(listed[0], listed[-1] + 1))
        listed += [listed[-1]] * (MIN_ROWS - count)
        return AdapterRows(digest, count, listed=torch.tensor(listed, device=self._device))

    def _wrapped(self, module_name: str) -> AdaptedLinear:
        """The module as an AdaptedLinear. Wraps it in place if needed."""
        parent_name, _, child_name = module_name.rpartition(".")
        parent = self._model.get_submodule(parent_name)
        child = getattr(parent, child_name)
        if not isinstance(child, AdaptedLinear):
            child = AdaptedLinear(child, self._routing)
            setattr(parent, child_name, child)
        return child

    def _drop_unused(self, adapter: Adapter) -> None:
        if adapter.digest in self._digests.values():
            return
        for module_name in adapter.updates:
            self._wrapped(module_name).updates.pop(adapter.digest, None)


def _linear(weight: torch.Tensor, packed: bool) -> nn.Module:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if not packed:
        return linear
    with torch.inference_mode():
        return PackedLinear(linear)

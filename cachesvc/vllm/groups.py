"""vLLM's groups of KV: what each keeps for a block, and what it needs to resume a prefix.

vLLM puts layers that keep the same kind of KV into a group, with block numbers of its own. For each
group the node has blocks with a layout and a root of their own. A prefix can be resumed where every
group has what it needs: all of its blocks, those of its last tokens, or the state at its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any

from cachesvc.model_files import UnsupportedKv
from tiers.blocks.layout import ITEM_BYTES, BlockLayout
from tiers.node.messages import describe_layout, described_layout, engine_layout, state_layout


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One of vLLM's groups. `number` is vLLM's, `layers` are its layers' names in order."""

    number: int
    layers: tuple[str, ...]
    layout: BlockLayout
    window: int | None = None  # tokens that the next one sees, itself included
    chunk: int | None = None  # tokens that see only each other
    is_aligned: bool = False  # a state, kept only where vLLM says so
    is_shared: bool = False  # the same on every rank of tensor parallelism, as MLA's latents are

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def is_whole(self) -> bool:
        """Whether it needs all blocks of a prefix. vLLM keeps them until the request ends."""
        return self.window is None and self.chunk is None

    def first(self, num_tokens: int) -> int:
        """The first block that is needed to resume after `num_tokens`: those before it are skipped,
        as by vLLM's `get_num_skipped_tokens`."""
        skipped = 0
        if self.window is not None:
            skipped = max(0, num_tokens - self.window + 1)
        elif self.chunk is not None:
            skipped = num_tokens // self.chunk * self.chunk
        return skipped // self.block_size


def describe_group(group: KvGroup) -> dict[str, Any]:
    """What a server must know of a group, as JSON."""
    needs = {"window": group.window, "chunk": group.chunk, "is_shared": group.is_shared}
    return {"number": group.number, "layout": describe_layout(group.layout), **needs}


def described_group(fields: Any) -> KvGroup:
    """The inverse of `describe_group`. The layers' names are left out."""
    needs = {name: fields[name] for name in ("window", "chunk", "is_shared")}
    return KvGroup(int(fields["number"]), (), described_layout(fields["layout"]), **needs)


def groups_of(config: Any, kv_cache: Any) -> tuple[KvGroup, ...]:
    """The groups of an engine with this `VllmConfig` and `KVCacheConfig`.

    One that needs all blocks comes first, if there is one: prefixes are counted in its blocks.
    Raises UnsupportedKv.
    """
    is_latent_on_cpu = config.model_config.use_mla and config.device_config.device_type == "cpu"
    if not (config.cache_config.enable_prefix_caching or is_latent_on_cpu):  # where vLLM has none
        raise UnsupportedKv("vLLM's prefix caching is off, as for models that need whole prompts")
    speculates = config.speculative_config is not None
    groups = [
        _group(number, each.kv_cache_spec, tuple(each.layer_names), speculates)
        for number, each in enumerate(kv_cache.kv_cache_groups)
    ]
    if not groups:
        raise UnsupportedKv("the model keeps no KV")
    return tuple(sorted(groups, key=lambda group: not group.is_whole))


def alignment(groups: Sequence[KvGroup]) -> int:
    """Prefixes end at multiples of so many tokens: at a block's end in every group."""
    return lcm(*(group.block_size for group in groups))


def _group(number: int, spec: Any, layers: tuple[str, ...], speculates: bool) -> KvGroup:
    from vllm.v1 import kv_cache_interface as kv

    if isinstance(spec, kv.UniformTypeKVCacheSpecs):  # of which vLLM's scheduler knows one layer
        raise ValueError(
            "cachesvc does not serve layers that keep blocks of several sizes in one group "
            "(UniformTypeKVCacheSpecs); start vLLM without this connector"
        )
    if not getattr(spec, "prefix_cacheable", True):
        raise UnsupportedKv(f"vLLM does not cache the prefixes of a {type(spec).__name__}")
    if isinstance(spec, kv.MambaSpec):
        if spec.mamba_cache_mode == "none":
            raise UnsupportedKv("vLLM keeps the model's states at no block's end")
        if speculates:
            raise UnsupportedKv("the states of speculative decoding are not served")
        # A state is what the next token sees of the one before it.
        is_aligned = spec.mamba_cache_mode == "align"
        return KvGroup(number, layers, _states(spec, len(layers)), 2, None, is_aligned)
    group = KvGroup(number, layers, _tokens(spec, len(layers)), is_shared=spec.max_tp_shards == 1)
    if isinstance(spec, kv.ChunkedLocalAttentionSpec):
        return replace(group, chunk=spec.attention_chunk_size)
    if isinstance(spec, kv.SlidingWindowSpec):
        retained = getattr(spec, "extra_retained_tokens", 0)
        return replace(group, window=spec.sliding_window + retained)
    if isinstance(spec, kv.FullAttentionSpec):
        return group
    raise UnsupportedKv(f"KV of vLLM's {type(spec).__name__} is not served")


def _tokens(spec: Any, num_layers: int) -> BlockLayout:
    """A block's layout for the tiers. Only the engine knows which bytes are K and which V."""
    dtype = _dtype(spec.dtype)
    token_bytes = spec.block_size * ITEM_BYTES[dtype]
    page_bytes = getattr(spec, "real_page_size_bytes", spec.page_size_bytes)
    token_items, rest = divmod(page_bytes, token_bytes)
    if rest:
        raise UnsupportedKv(f"a page of {page_bytes} bytes is not a whole number per token")
    return engine_layout(num_layers, token_items, spec.block_size, dtype)


def _states(spec: Any, num_layers: int) -> BlockLayout:
    """The layout of states, which may be of several dtypes: a run of bytes for each layer."""
    sizes = [prod(shape) for shape in spec.shapes]
    dtype = _dtype(spec.dtypes[-1])  # the recurrent one, by far the largest
    num_bytes = sum(n * each.itemsize for n, each in zip(sizes, spec.dtypes, strict=True))
    items, rest = divmod(num_bytes, ITEM_BYTES[dtype])
    if rest:
        raise UnsupportedKv(f"a state of {num_bytes} bytes is not a whole number of {dtype}")
    return state_layout(num_layers, items, spec.block_size, dtype)


def _dtype(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise UnsupportedKv(f"KV of dtype {name} is not served; use --kv-cache-dtype auto")
    return name

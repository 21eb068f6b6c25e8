"""Models: loaded, checked, and described for the rest of the engine.

`load_model` runs at start-up on the thread that starts the engine. Definitions, weights and chat
templates are transformers'; what is checked here is that paged attention can serve the model: it is
run over a few tokens with transformers' own attention and with ours, and the logits must agree.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from engine.attention import base as attention
from engine.attention.base import AttentionOptions, attend_dense
from engine.batch import Span
from engine.errors import AdapterError, ModelError
from engine.models import packing
from engine.models.adapter_bank import AdapterBank
from engine.models.adapters import Adapter
from engine.models.adapters import load_adapter as read_adapter
from engine.models.files import find
from engine.models.gguf import Progress
from engine.request import SamplingParams
from engine.text.tokenizer import Tokenizer
from tiers.blocks.layout import DTYPES, BlockLayout

logger = logging.getLogger(__name__)


# Kinds of layers (`config.layer_types`) whose whole state is the KV of each token.
_PAGED_LAYERS = frozenset({"full_attention", "sliding_attention"})
_PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what the engine must know of it.

    `weights_digest` is 16 bytes over the weights' and the config's contents and the compute dtype:
    KV is shared only between equal ones. `max_context` is in tokens. `adapters` are the model's
    LoRA adapters; they are none of what `weights_digest` is over.
    """

    name: str
    model: nn.Module
    tokenizer: Tokenizer
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]
    weights_digest: bytes
    dtype: str
    device: str
    adapters: AdapterBank

    def layout(self, block_size: int, kv_dtype: str | None = None) -> BlockLayout:
        """The layout of this model's blocks; `kv_dtype` None means the compute dtype."""
        return BlockLayout(
            num_layers=self.num_layers,
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=kv_dtype or self.dtype,
        )


def load_model(
    name: str,
    *,
    device: str,
    dtype: str,
    cache_dir: Path,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load the model `name`: an alias, a folder (safetensors or GGUF), a GGUF file, or a hub id.

    `dtype` is a name from `tiers.blocks.layout.DTYPES`, or "auto" (float32 on a CPU, bfloat16
    elsewhere).
    A GGUF file is converted once into `cache_dir`. `progress(what, fraction)` is called while slow
    work is under way. Raises ModelError, with the reason, for a model that cannot be served.
    """
    report = progress or (lambda what, fraction: None)
    if dtype == "auto":
        dtype = "float32" if torch.device(device).type == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}, auto")
    transformers_logging.disable_progress_bar()
    folder, content = find(name, cache_dir, report)
    tokenizer = Tokenizer(_load_tokenizer(folder))
    model = _load_weights(folder, DTYPES[dtype], device)
    digest = xxhash.xxh3_128_digest(content + dtype.encode())
    return describe(name, model, tokenizer, weights_digest=digest, dtype=dtype, device=device)


def describe(
    name: str,
    model: nn.Module,
    tokenizer: Tokenizer,
    *,
    weights_digest: bytes,
    dtype: str,
    device: str,
) -> LoadedModel:
    """Pack `model` for its device, check that paged attention serves it, and say what it is."""
    attention.register()
    config: Any = model.config
    text_config = config.get_text_config()
    num_layers, num_kv_heads, head_dim = prepare(model)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=text_config.vocab_size,
        max_context=text_config.max_position_embeddings,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        weights_digest=weights_digest,
        dtype=dtype,
        device=device,
        adapters=AdapterBank(model, device),
    )


def load_adapter(loaded: LoadedModel, name: str, source: str) -> Adapter:
    """Serve the LoRA adapter in the folder or hub id `source` under `name`, beside the model.

    Before serving, or on the engine thread between steps. One that had the name is replaced.
    Raises AdapterError, with the reason, for one that cannot be served.
    """
    bank = loaded.adapters
    adapter = read_adapter(name, source, bank.shapes, dtype=loaded.dtype, device=loaded.device)
    bank.add(adapter)
    try:
        logits = _adapted_logits(loaded, name)
        if not torch.isfinite(logits).all():
            raise AdapterError("with it the model computes logits that are not finite")
    except AdapterError as error:
        bank.remove(name)
        raise AdapterError(f"adapter {name} ({source}) is not served: {error}") from None
    logger.info(f"adapter {name}: {adapter.num_parameters:,} parameters from {source}")
    return adapter


# Loading it.


def _load_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{folder} holds no usable tokenizer: {error}") from error


def _load_weights(folder: Path, dtype: torch.dtype, device: str) -> nn.Module:
    try:
        config = AutoConfig.from_pretrained(folder)
        _refuse_unsupported(config)
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{folder} cannot be loaded: {error}") from error
    # transformers fills what is missing with random numbers and warns; answers would be noise.
    unusable = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
    if unusable:
        raise ModelError(
            f"{folder} lacks {len(unusable)} of the weights that its config.json asks for, "
            f"{unusable[0]} the first; fetch the whole checkpoint"
        )
    model.eval().requires_grad_(False)
    moved: nn.Module = model.to(device)
    return moved


def _refuse_unsupported(config: Any) -> None:
    if config.is_encoder_decoder:
        raise ModelError(f"{config.model_type} is an encoder-decoder; only decoders are supported")
    text_config = config.get_text_config()
    others = set(getattr(text_config, "layer_types", None) or ()) - _PAGED_LAYERS
    if others:
        raise ModelError(
            f"{config.model_type} has layers of kind {', '.join(sorted(others))}, whose state is "
            f"not the KV of each token"
        )


def _eos_token_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for given in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        found.update([given] if isinstance(given, int) else given or ())
    if not found and isinstance(model.config.eos_token_id, int):
        found.add(model.config.eos_token_id)
    return frozenset(found)


# Checking that paged attention serves it.


class _Probe:
    """Attention over the tokens of one call alone, noting what each layer asked for."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.shapes: set[tuple[int, ...]] = set()

    def begin(self, spans: Sequence[Span]) -> None:
        pass

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        self.layers.append(layer)
        self.shapes |= {tuple(key.shape[1:]), tuple(value.shape[1:])}
        return attend_dense(query, key, value, 0, options)

    def finish(self) -> None:
        pass

    def forget(self, sequence_id: int) -> None:
        pass


@torch.inference_mode()
def _adapted_logits(loaded: LoadedModel, name: str) -> torch.Tensor:
    """The probe's logits with an adapter. Raises AdapterError where a layer that it updates is not
    computed for every token."""
    tokens = np.zeros(_PROBE_TOKENS, np.int32)
    span = Span(-1, tokens, 0, [], True, SamplingParams(), adapter=name)
    loaded.adapters.begin([span], _PROBE_TOKENS)
    try:
        return _probe_logits(loaded.model, attention.IMPLEMENTATION, paged=_Probe())
    finally:
        loaded.adapters.finish()


@torch.inference_mode()
def prepare(model: Any) -> tuple[int, int, int]:
    """Pack the model and switch paged attention on; returns (layers, KV heads, head dim).

    Raises ModelError unless every layer attends through the interface, in order, with KV of one
    shape, and the logits are those of transformers' own modules and attention.
    """
    kind = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"{kind} does not support transformers' attention interface")
    probe = _Probe()
    expected = _probe_logits(model, "eager")
    if packing.can_pack(model):
        packing.pack(model)
    actual = _probe_logits(model, attention.IMPLEMENTATION, paged=probe)
    num_layers = model.config.get_text_config().num_hidden_layers
    if probe.layers != list(range(num_layers)):
        raise ModelError(
            f"{kind} has {num_layers} layers, of which {probe.layers} came to attention: its KV "
            f"cannot be paged"
        )
    if len(probe.shapes) != 1:
        raise ModelError(f"{kind} has KV of several shapes {sorted(probe.shapes)} (heads, dim)")
    error = (actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    if not error <= tolerance:
        raise ModelError(
            f"{kind} gives other logits with paged attention (relative difference {error:.2g}, at "
            f"most {tolerance} expected)"
        )
    ((num_kv_heads, head_dim),) = probe.shapes
    return num_layers, num_kv_heads, head_dim


def _probe_logits(model: Any, implementation: str, **arguments: Any) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.arange(1, _PROBE_TOKENS + 1, device=model.device) * 7919 % vocab_size
    positions = torch.arange(_PROBE_TOKENS, device=model.device)
    output = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        use_cache=False,
        **arguments,
    )
    logits: torch.Tensor = output.logits
    return logits[0].float()

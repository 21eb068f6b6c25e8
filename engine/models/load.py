"""Loads and checks a model, and describes it for the rest of the engine.

`load_model` runs at start-up on the thread that starts the engine. Definitions, weights and chat
templates come from transformers. `engine.models.probe` proves that paged attention works for the
model.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import safe_open
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.utils import logging as transformers_logging

from engine.attention import base as attention
from engine.attention.recurrent import StatePort, page_recurrent
from engine.batch import Span
from engine.errors import AdapterError, ModelError
from engine.hardware import attend_without_plans, default_dtype
from engine.models.adapter_bank import AdapterBank
from engine.models.adapters import Adapter
from engine.models.adapters import load_adapter as read_adapter
from engine.models.arithmetic import Arithmetic, arithmetic_of
from engine.models.describe import load_tokenizer
from engine.models.elementwise import Watch
from engine.models.files import bytes_here, digest_of, find, is_on_hub
from engine.models.gguf import Progress, convert_again
from engine.models.narrow_file import NarrowFile
from engine.models.packing import can_pack, has_bfloat16
from engine.models.probe import PROBE_TOKENS, prepare, probe_logits
from engine.models.rope import check_settings, fix_tables
from engine.models.towers import drop_towers, is_text_of
from engine.models.unfilled import Unfilled
from engine.models.versions import naming_versions
from engine.operators.library import BUILT, Operators
from engine.promise import Equal, Promise
from engine.request import SamplingParams
from engine.text.tokenizer import Tokenizer
from tiers.blocks.layout import ITEM_BYTES, BlockLayout, LayerLayout, sized_layout, torch_dtype

logger = logging.getLogger(__name__)


UNBOUNDED = 1 << 20  # the context of a model whose config names none, as of Mamba
# Kinds of layers (`config.layer_types`) whose state is the KV of each token, a recurrent state,
# both or nothing.
_PAGED_LAYERS = frozenset(
    {*("full_attention", "sliding_attention", "linear_attention"), *("hybrid", "moe", "mlp")}
)
# What only other engines compute, by the field of the config that asks for it.
_ELSEWHERE = {
    "compress_rates": "compressed entries",
    **dict.fromkeys(("index_topk", "index_topk_blocks", "indexer_budget"), "a sparse index"),
}
# By model type, layers whose state is stored at the end of each block.
_STATES = {name: frozenset({"conv"}) for name in ("lfm2", "lfm2_moe", "lfm3")}
# Types unknown to transformers, whose repositories contain a copy of code that it has.
_SAME_AS = {"kimi_k2": "deepseek_v3"}
# Quantizations (`quantization_config.quant_method`) that transformers can dequantize.
_DEQUANTISED = ("fp8", "mxfp4")


# From this size on, operators are compiled: smaller models are for trying things out.
_COMPILED_FROM_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what the engine must know of it.

    `weights_digest` is 16 bytes over the contents of the weights and the config and over the
    compute dtype. KV is shared only between equal digests. `layers` is what each layer stores per
    token. `max_context` is in tokens. `adapters` are the model's LoRA adapters, which
    `weights_digest` does not cover. `arithmetic` is what else the bits of KV depend on.
    """

    name: str
    model: nn.Module
    tokenizer: Tokenizer
    layers: tuple[LayerLayout, ...]
    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]
    weights_digest: bytes
    dtype: str
    device: str
    adapters: AdapterBank
    arithmetic: Arithmetic
    port: StatePort | None = None  # of the modules with recurrent states; None: there are none
    operators: Operators | None = None  # compiled for its forward and the disk; None: none are

    def promise(self, *, activated_by_row: bool) -> Promise:
        """What a hit leaves equal, adapters included. `activated_by_row` says that the forward
        calls none of torch's activations."""
        promise = self.arithmetic.promise
        if self.adapters.digests:
            reason = "adapters are multiplied for as many rows as ask for them"
            promise = promise.or_weaker(Promise(Equal.TOKENS, reason))
        return promise if activated_by_row else promise.or_weaker(self.arithmetic.activations)

    @property
    def fuses(self) -> bool:
        """Whether its forward calls compiled operators."""
        there = self.operators is not None and self.operators.loaded is not None
        return there and _may_fuse(self.device, self.dtype)

    def layout(self, block_size: int | None = None, kv_dtype: str | None = None) -> BlockLayout:
        """The layout of this model's blocks. `block_size` None follows the bytes of a token, and
        `kv_dtype` None means the compute dtype."""
        states = self.port.tensors if self.port is not None else ()
        return sized_layout(self.layers, kv_dtype or self.dtype, states, block_size=block_size)


def load_model(
    name: str, *, device: str, dtype: str, cache_dir: Path, progress: Progress | None = None
) -> LoadedModel:
    """Load the model `name`: an alias, a folder (safetensors or GGUF), a GGUF file, or a hub id.

    `dtype` is a name from `tiers.blocks.layout.ITEM_BYTES`, or "auto" (see `default_dtype`). A GGUF
    file is converted once into `cache_dir`. `progress(what, fraction)` is called during slow work.
    Raises ModelError, with the reason, for a model that cannot be served.
    """
    report = progress or (lambda what, fraction: None)
    if dtype == "auto":
        dtype = default_dtype(device)
    elif dtype == "bfloat16" and default_dtype(device) == "float16":
        raise ModelError("this GPU does not multiply bfloat16; run with --dtype float16")
    if dtype not in ITEM_BYTES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}, auto")
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # what it warns of is refused here
    if is_on_hub(name):
        _read_config(Path(name))  # before the weights are fetched
    operators = kept = None
    if bytes_here(name) >= _COMPILED_FROM_BYTES:
        operators = Operators(cache_dir, BUILT)  # compiled while the model is converted and loads
    folder = find(name, cache_dir, report)
    config = _read_config(folder)
    content = digest_of(folder)
    num_bytes = bytes_here(str(folder))
    if num_bytes >= _COMPILED_FROM_BYTES:
        operators = operators or Operators(cache_dir, BUILT)
        if _may_fuse(device, dtype):
            kept = NarrowFile(cache_dir, content, operators.key, replaces_bytes=num_bytes)
    tokenizer = load_tokenizer(folder)
    model = _load_weights(folder, config, torch_dtype(dtype), device)
    if is_text_of(model.config):
        drop_towers(model)
    if operators is not None and operators.is_compiling:
        report("compiling operators", 0.95)  # mostly done beside the rest
    digest = xxhash.xxh3_128_digest(content + dtype.encode())
    return describe(
        name,
        model,
        tokenizer,
        weights_digest=digest,
        dtype=dtype,
        device=device,
        operators=operators,
        kept=kept,
    )


def describe(
    name: str,
    model: nn.Module,
    tokenizer: Tokenizer,
    *,
    weights_digest: bytes,
    dtype: str,
    device: str,
    operators: Operators | None = None,
    kept: NarrowFile | None = None,
) -> LoadedModel:
    """Pack `model` for its device, check that paged attention works for it, and describe it.
    `kept` has its narrow weights, or takes them for later starts."""
    attention.register()
    attend_without_plans(device)
    config: Any = model.config
    text_config = config.get_text_config()
    max_context = getattr(text_config, "max_position_embeddings", UNBOUNDED)
    if fix_tables(model, max_context):
        # Keys rotated by another table are different keys.
        weights_digest = xxhash.xxh3_128_digest(weights_digest + b"rope:%d" % max_context)
    port = page_recurrent(model)
    narrow = operators is not None and operators.load() and _may_fuse(device, dtype)
    if not narrow or not can_pack(model):
        kept = None
    placed = kept is not None and kept.place(model)
    with naming_versions():
        watch = Watch(PROBE_TOKENS)
        layers = prepare(model, max_context, port, narrow=narrow, watch=watch)
    if kept is not None and not placed:
        kept.write(model)
    arithmetic = arithmetic_of(model, device, watch.calls)
    adapters = AdapterBank(model, device)
    if port is not None:
        port.routing = adapters.routing
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        layers=layers,
        vocab_size=text_config.vocab_size,
        max_context=max_context,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        weights_digest=weights_digest,
        dtype=dtype,
        device=device,
        adapters=adapters,
        arithmetic=arithmetic,
        port=port,
        operators=operators,
    )


def load_adapter(loaded: LoadedModel, name: str, source: str) -> Adapter:
    """Serve the LoRA adapter from the folder or hub id `source` under `name`, beside the model.

    Call it before serving, or on the engine thread between steps. It replaces an adapter of that
    name. Raises AdapterError, with the reason, if the adapter cannot be served.
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


# Loading.


def _read_config(folder: Path) -> Any:
    """Raises ModelError for one that cannot be read, or of a model that cannot be served."""
    try:
        config = _load_config(folder)
        with naming_versions():
            refuse_unsupported(config)
        return config
    except ModelError:
        raise
    except Exception as error:  # transformers' errors have no common root
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: Exception) -> ModelError:
    why = " ".join(str(error).split())
    return ModelError(f"{folder} cannot be loaded: {why}{convert_again(folder)}")


def _load_weights(folder: Path, config: Any, dtype: torch.dtype, device: str) -> nn.Module:
    try:
        _recommend_bfloat16(config, dtype, device)
        dequantized = _dequantize(config)
        kind = AutoModelForImageTextToText if is_text_of(config) else AutoModelForCausalLM
        try:
            with Unfilled():
                model, loading = _from_pretrained(kind, folder, config, dtype)
        except RuntimeError as error:  # such as of tensors on two devices
            logger.info("the model is built with symbols: %s", error)
            model, loading = _from_pretrained(kind, folder, config, dtype)
    except ModelError:
        raise
    except Exception as error:  # transformers' and its quantizers' errors have no common root
        raise _unusable(folder, error) from error
    # transformers only warns about missing weights and fills them with random numbers. Answers
    # would be noise.
    unusable = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
    if unusable:
        raise ModelError(
            f"{folder} lacks {len(unusable)} of the weights that its config.json asks for, "
            f"{unusable[0]} the first{convert_again(folder) or '; fetch the whole checkpoint'}"
        )
    if unknown := sorted(map(str, loading["unexpected_keys"])):
        raise ModelError(
            f"{folder} has {len(unknown)} weights that transformers' {config.model_type} does not "
            f"use, {unknown[0]} the first; without them answers may be another model's"
        )
    if dequantized:
        _cast(model, dtype)
    else:
        _refuse_integers(folder)
    model.eval().requires_grad_(False)
    moved: nn.Module = model.to(device)
    return moved


def _refuse_integers(folder: Path) -> None:
    """Raise ModelError for weights in integers, which transformers takes for floating point."""
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dict
                kind = file.get_slice(name).get_dtype()
                if kind[0] in "IU" and name.endswith(("weight", "_proj")):
                    raise ModelError(f"{folder} has {name} in {kind}, which is not served")


def _from_pretrained(kind: Any, folder: Path, config: Any, dtype: torch.dtype) -> Any:
    return kind.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, by name
        trust_remote_code=False,
    )


def _load_config(folder: Path) -> Any:
    given, _ = PreTrainedConfig.get_config_dict(folder)
    known_as = _SAME_AS.get(given.get("model_type", ""))
    if known_as is None:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    else:
        config = CONFIG_MAPPING[known_as].from_dict({**given, "model_type": known_as})
    check_settings(folder, given, config)
    return config


def refuse_unsupported(config: Any) -> None:
    """Raise ModelError for a model that its config alone shows not to be served."""
    if config.is_encoder_decoder:
        raise ModelError(f"{config.model_type} is an encoder-decoder; only decoders are supported")
    text_config = config.get_text_config()
    for field, what in _ELSEWHERE.items():
        if getattr(text_config, field, None):
            raise ModelError(
                f"{config.model_type} has {what} ({field} in its config.json), which the embedded "
                f"engine does not compute; serve it with vLLM: --engine vllm, or --engine URL"
            )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not is_text_of(config):
        raise ModelError(
            f"transformers has no causal language model of type {config.model_type}; served are "
            f"models of text"
        )
    served = _PAGED_LAYERS | _STATES.get(text_config.model_type, frozenset())
    others = set(getattr(text_config, "layer_types", None) or ()) - served
    if others:
        raise ModelError(
            f"{config.model_type} has layers of kind {', '.join(sorted(others))}, whose state is "
            f"not the KV of each token"
        )


def _recommend_bfloat16(config: Any, dtype: torch.dtype, device: str) -> None:
    """Log a hint if a bfloat16 checkpoint is computed in float32 although this CPU has bfloat16."""
    published = getattr(config.get_text_config(), "dtype", None)
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu and dtype == torch.float32 and published == torch.bfloat16 and has_bfloat16():
        logger.info(
            "the weights are published in bfloat16, which this processor multiplies itself: "
            "--dtype bfloat16 halves their memory and the KV's and decodes faster; answers may "
            "differ from float32's"
        )


def _dequantize(config: Any) -> bool:
    """Whether the weights are quantized. Asks transformers to dequantize them.

    Raises ModelError if it cannot. A row's result in a quantized layer may depend on the rows
    beside it.
    """
    given = getattr(config, "quantization_config", None)
    if given is None:
        return False
    settings = dict(given if isinstance(given, dict) else given.to_dict())
    method = settings.get("quant_method")
    if method not in _DEQUANTISED:
        raise ModelError(
            f"the checkpoint is quantized by {method}; served are {', '.join(_DEQUANTISED)}, "
            f"dequantized at load; give the unquantized checkpoint, or a GGUF file"
        )
    config.quantization_config = {**settings, "dequantize": True}
    return True


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Convert dequantized weights, whose dtype the quantizer chose, to `dtype`."""
    kept = (*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ()))
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)


def _may_fuse(device: str, dtype: str) -> bool:
    """Whether the compiler's operators are for this arithmetic. Elsewhere they only expand the
    disk's records."""
    return device == "cpu" and dtype == "float32"


def _eos_token_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for given in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        found.update([given] if isinstance(given, int) else given or ())
    if not found and isinstance(model.config.eos_token_id, int):
        found.add(model.config.eos_token_id)
    return frozenset(found)


@torch.inference_mode()
def _adapted_logits(loaded: LoadedModel, name: str) -> torch.Tensor:
    """The probe's logits with an adapter. Raises AdapterError if a layer that it updates is not
    computed for every token."""
    tokens = np.zeros(PROBE_TOKENS, np.int32)
    span = Span(-1, tokens, 0, [], True, SamplingParams(), adapter=name)
    loaded.adapters.begin([span], PROBE_TOKENS)
    try:
        return probe_logits(loaded.model, loaded.port)
    except AttributeError as error:
        raise AdapterError(f"the model reads the weight of a layer itself ({error})") from error
    finally:
        loaded.adapters.finish()

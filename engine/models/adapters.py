"""Reads LoRA adapters from disk or the hub, checks them, and identifies them by content.

    adapter_config.json ─► its scale, and whether it needs more than low-rank updates
    adapter_model.safetensors ─► A and B of each module ─► Adapter(digest, {module: LowRank})

`load_adapter` runs on the thread that loads the model, before it is served. peft reads the files;
this is the only import of peft. `engine.models.adapter_bank` computes with them.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
import xxhash
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.errors import AdapterError
from engine.models.files import GIVE_ADAPTER, locate_adapter
from engine.models.packing import PackedLinear
from tiers.blocks.layout import torch_dtype

_PREFIX = "base_model.model."  # prefix of a wrapped model's modules in peft
_A, _B = ".lora_A.weight", ".lora_B.weight"

# Fields of peft's LoraConfig that may have any value: they say what was trained and where, or
# matter only in training. Any other field must have its default.
_SERVED_FIELDS = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying"),
        *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode"),
        *("init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config"),
        *("lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version"),
        *("qalora_group_size", "r", "rank_pattern", "revision", "runtime_config"),
        *("target_modules", "task_type", "use_rslora"),
    }
)
# Initialisations that leave the base model's weights unchanged.
_SERVED_INITS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LowRank:
    """One module's update: y += (x a^T) b^T. `a`: [r, in]; `b`: [out, r], including the scale."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's updates of the model. Equal digests compute the same, whatever the names.

    `digest` is 16 bytes over all that affects results: the modules' names and scaled matrices.
    """

    name: str
    source: str
    digest: bytes
    updates: Mapping[str, LowRank]  # by module name in the model

    @property
    def num_parameters(self) -> int:
        return sum(update.a.numel() + update.b.numel() for update in self.updates.values())


def load_adapter(
    name: str, source: str, shapes: Mapping[str, tuple[int, int]], *, dtype: str, device: str
) -> Adapter:
    """Read the adapter from the folder or hub id `source`, for a model with these `linear_shapes`.

    `dtype` is the model's, from the layout's `ITEM_BYTES`. Raises AdapterError, with the reason, if
    files are missing or broken, if the shapes are another model's, or if it is not plain LoRA.
    """
    config, tensors = _read(name, source)
    _refuse_unserved(name, config)
    pairs = _pairs(name, tensors)
    _refuse_incomplete(name, config, pairs, shapes)
    updates = {}
    for module_name, (a, b) in sorted(pairs.items()):
        _check_pair(name, module_name, a, b, shapes.get(module_name), config)
        scale = _scale(name, module_name, a.shape[0], config)
        updates[module_name] = LowRank(
            a.to(device, torch_dtype(dtype)).contiguous(),
            (b.float() * scale).to(device, torch_dtype(dtype)).contiguous(),
        )
    return Adapter(name, source, _digest(updates), updates)


def linear_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) by name of the linear layers between embedding and output, packed or not.
    An adapter may update these."""
    shapes = {}
    for name, module in model.named_modules():
        if module is model.get_output_embeddings():
            continue
        if isinstance(module, nn.Linear | PackedLinear):
            shapes[name] = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            shapes[name] = module.nx, module.nf
    return shapes


def _read(name: str, source: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """peft's config, and the tensors by their saved names."""
    try:
        from peft import PeftConfig, load_peft_weights
    except ImportError:
        raise AdapterError(
            f"adapter {name}: reading LoRA adapters needs the package peft: "
            f"pip install 'cachesvc[lora]'"
        ) from None
    source = locate_adapter(name, source)
    try:
        with warnings.catch_warnings(record=True) as ignored:
            warnings.simplefilter("always")
            config = PeftConfig.from_pretrained(source)
        if ignored:
            raise AdapterError(f"adapter {name} ({source}): {ignored[0].message}")
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            raise AdapterError(f"adapter {name} ({source}) is of kind {kind}; only LoRA is served")
        return config, load_peft_weights(source, device="cpu")
    except AdapterError:
        raise
    except Exception as error:  # peft's, the hub's and safetensors' errors have no common root
        raise AdapterError(
            f"adapter {name}: {source} cannot be read ({type(error).__name__}: {error}); "
            f"{GIVE_ADAPTER}"
        ) from error


def _refuse_unserved(name: str, config: Any) -> None:
    """Raise AdapterError for a config that needs more than scaled low-rank updates."""
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name in _SERVED_FIELDS or value == default or not value:
            continue
        raise AdapterError(
            f"adapter {name} has {field.name}={value!r} in its config, which is not served; serve "
            f"plain LoRA, or merge the adapter into the model and serve that"
        )
    if config.init_lora_weights not in _SERVED_INITS:
        raise AdapterError(
            f"adapter {name} was initialised by {config.init_lora_weights!r}, which changes the "
            f"base model's weights; convert it to plain LoRA (peft: save_pretrained with "
            f"path_initial_model_for_weight_conversion)"
        )


def _pairs(
    name: str, tensors: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B by module name in the model."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        suffix = key[-len(_A) :]
        if not key.startswith(_PREFIX) or suffix not in (_A, _B):
            raise AdapterError(
                f"adapter {name} holds the weight {key}, which is not a low-rank update of a "
                f"linear layer (embeddings, biases, norms and DoRA's magnitudes are not served)"
            )
        halves.setdefault(key[len(_PREFIX) : -len(_A)], {})[suffix] = tensor
    for module_name, half in halves.items():
        if len(half) != 2:
            raise AdapterError(f"adapter {name} has only one of two matrices for {module_name}")
    if not halves:
        raise AdapterError(f"adapter {name} holds no weights")
    return {module_name: (half[_A], half[_B]) for module_name, half in halves.items()}


def _refuse_incomplete(
    name: str, config: Any, pairs: Mapping[str, object], shapes: Mapping[str, object]
) -> None:
    """Raise AdapterError if the config targets modules for which the file has no tensors.

    peft would only warn, and fill them with random numbers.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    if config.target_modules is None:
        raise AdapterError(f"adapter {name} has no target_modules in its config")
    if config.target_modules == "all-linear":
        targeted = set(shapes)
    else:
        targeted = {one for one in shapes if check_target_module_exists(config, one)}
    if missing := sorted(targeted - pairs.keys()):
        raise AdapterError(
            f"adapter {name} lacks weights for {len(missing)} of the modules that its config "
            f"targets, {missing[0]} the first; fetch the whole adapter"
        )
    if extra := sorted((pairs.keys() & shapes.keys()) - targeted):
        raise AdapterError(
            f"adapter {name} has weights for {len(extra)} modules that its config does not target, "
            f"{extra[0]} the first; its files do not belong together"
        )
    for field in ("target_modules", "layers_to_transform", "rank_pattern", "alpha_pattern"):
        value = getattr(config, field)
        if isinstance(value, str):
            continue  # an expression that matched, or all of them
        for named in [value] if isinstance(value, int) else value or ():
            if not any(_names(field, named, one) for one in targeted):
                raise AdapterError(
                    f"adapter {name} has {named!r} in its {field}, which is none of the modules "
                    f"that it updates in this model"
                )


def _names(field: str, named: Any, module_name: str) -> bool:
    """Whether what a field of the config names is the module, or has it within."""
    from peft.utils.other import get_pattern_key

    if field == "layers_to_transform":
        return f".{named}." in module_name
    if field == "target_modules":
        return f".{module_name}".endswith(f".{named}")
    return bool(get_pattern_key([named], module_name) == named)


def _check_pair(
    name: str,
    module_name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    shape: tuple[int, int] | None,
    config: Any,
) -> None:
    """Raise AdapterError unless A and B fit each other and a layer of the model."""
    base = config.base_model_name_or_path or "another model"
    if shape is None:
        raise AdapterError(
            f"adapter {name} updates {module_name}, which is not a linear layer between this "
            f"model's embedding and output; it was made for {base}"
        )
    if (a.shape[1], b.shape[0]) != shape or a.shape[0] != b.shape[1]:
        raise AdapterError(
            f"adapter {name} has matrices {list(a.shape)} and {list(b.shape)} for {module_name}, "
            f"which has {shape[0]} inputs and {shape[1]} outputs; it was made for {base}"
        )
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise AdapterError(f"adapter {name} has numbers that are not finite for {module_name}")


def _scale(name: str, module_name: str, rank: int, config: Any) -> float:
    """The factor of the module's update in peft: alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv
    2312.03732)."""
    from peft.utils.other import get_pattern_key

    def pattern(table: Mapping[str, Any], default: Any) -> Any:
        return table.get(get_pattern_key(table.keys(), module_name), default)

    expected = pattern(config.rank_pattern, config.r)
    if rank != expected:
        raise AdapterError(
            f"adapter {name} has matrices of rank {rank} for {module_name}, and its config says "
            f"{expected}; its files do not belong together"
        )
    alpha = pattern(config.alpha_pattern, config.lora_alpha)
    return float(alpha / math.sqrt(rank) if config.use_rslora else alpha / rank)


def _digest(updates: Mapping[str, LowRank]) -> bytes:
    hasher = xxhash.xxh3_128(b"cachesvc.adapter.v1")
    for module_name, update in updates.items():
        for matrix in (update.a, update.b):
            head = f"{module_name}\0{tuple(matrix.shape)}\0{matrix.dtype}\0"
            hasher.update(head.encode())
            hasher.update(matrix.cpu().view(torch.uint8).numpy().tobytes())
    return hasher.digest()

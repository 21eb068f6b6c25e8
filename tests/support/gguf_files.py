"""Writes tiny models as GGUF files, in the order and with the fields of llama.cpp's converter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.support.models import EOS, VOCAB_SIZE

CONTEXT = 512
_COMMON: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96}
_COMMON |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_COMMON |= {"head_dim": 16, "max_position_embeddings": CONTEXT, "initializer_range": 0.2}
_COMMON |= {"eos_token_id": EOS, "bos_token_id": None, "pad_token_id": EOS}
_COMMON |= {"tie_word_embeddings": False}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
_GPT2 |= {"n_inner": 96, "num_key_value_heads": None, "head_dim": None}
_TIED = {"tie_word_embeddings": True}
_GEMMA = {**_TIED, "sliding_window": 24, "query_pre_attn_scalar": 16}
# By GGUF's name: transformers' type, and what its config says beside the common.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", _TIED),
    "qwen2moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3moe": ("qwen3_moe", {**_EXPERTS, "norm_topk_prob": True}),
    "phi3": ("phi3", {"sliding_window": 40}),
    "gemma": ("gemma", _TIED),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", {**_GEMMA, "num_hidden_layers": 7}),
    "gpt2": ("gpt2", {**_GPT2, **_TIED}),
}
_FIELDS = {  # of a config, by the name without the architecture's
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon",),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}


def tokens() -> list[str]:
    """The 256 bytes as byte-level BPE writes them, what ends an answer, and a merge."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [256 + n for n in range(256 - len(shown))]
    return [chr(n) for n in [*shown, *others]] + ["<|im_end|>", "ab"]


def stock(kind: str, model_type: str | None = None, **config: Any) -> Any:
    """transformers' own model of the architecture, whose norms a GGUF stores without rounding."""
    own, more = KINDS[kind]
    made = CONFIG_MAPPING[model_type or own](**{**_COMMON, **more, **config})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        for name, tensor in model.state_dict().items():
            if "norm" in name or name.endswith("bias"):
                tensor.copy_(torch.randint(-64, 64, tensor.shape) / 256 + ("bias" not in name))
    return model.eval().requires_grad_(False)


def fields_of(kind: str, model: Any) -> dict[str, Any]:
    """The fields that describe the model and its tokenizer."""
    config = model.config
    found: dict[str, Any] = {}
    for name, sources in _FIELDS.items():
        values = [getattr(config, source, None) for source in sources]
        found |= {f"{kind}.{name}": value for value in values if value is not None}
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("full_attention", rope).get("rope_theta")
    if theta is not None:
        found |= {f"{kind}.rope.freq_base": theta, f"{kind}.rope.dimension_count": config.head_dim}
    return {
        **found,
        "general.name": "tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens(),
        "tokenizer.ggml.token_type": [1] * 256 + [3, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": EOS,
    }


def tensors_of(kind: str, model: Any) -> dict[str, np.ndarray]:
    """The model's weights under their GGUF names, as llama.cpp stores them."""
    config = model.config
    (arch,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        weight, parts = tensor.numpy(), name.split(".")
        if name == "lm_head.weight":
            found |= {} if config.tie_word_embeddings else {"output.weight": weight}
            continue
        if name.endswith("gate_up_proj"):
            for half, part in zip(("gate", "up"), np.split(weight, 2, axis=1), strict=True):
                found[f"blk.{parts[2]}.ffn_{half}_exps.weight"] = part
            continue
        theirs = table.get_name(name, try_suffixes=(".weight", ".bias"))
        theirs += "" if theirs.endswith((".weight", ".bias")) else ".weight"
        if kind == "llama" and parts[-2] in ("q_proj", "k_proj"):
            halves = weight.reshape(-1, 2, config.head_dim // 2, *weight.shape[1:])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        if kind.startswith("gemma") and theirs.endswith("norm.weight"):
            weight = weight + 1
        if kind == "gpt2" and theirs.startswith("blk.") and weight.ndim == 2:
            weight = weight.T
        found[theirs] = weight[0] if theirs.endswith("gate_inp_shexp.weight") else weight
    return found


def write_gguf(
    path: Path,
    kind: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    part: tuple[int, int, int] | None = None,
) -> Path:
    """`part`: the number of the file, of how many, and the number of all tensors."""
    writer = gguf.GGUFWriter(path, kind)
    for name, value in fields.items():
        _add(writer, name, value)
    if part is not None:
        for name, number in zip(("split.no", "split.count"), part[:2], strict=True):
            writer.add_uint16(name, number)
        writer.add_int32("split.tensors.count", part[2])
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)

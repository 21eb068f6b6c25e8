"""What the fields of a GGUF file say, as transformers' config.

A field is used here, must have the one value that changes nothing, or is left in the file and
refuses it. Meanings and defaults are llama.cpp's (`src/llama-model.cpp`, `convert_hf_to_gguf.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import CONFIG_MAPPING

from engine.errors import ModelError
from engine.models.gguf_file import NUMBER, GgufFile

_LLAMA3_CONTEXT = 8192

_DENSE = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_EXPERTS = {
    **_DENSE,
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Values that change nothing, by field. Another value is refused by name.
_ZERO = (
    *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.sliding_window"),
    *("attn_logit_softcapping", "final_logit_softcapping", "expert_count", "expert_used_count"),
    *("leading_dense_block_count", "nextn_predict_layers", "pooling_type"),
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ZERO, (0,)),
    **dict.fromkeys(
        ("embedding_scale", "expert_weights_scale", "logit_scale", "residual_scale"), (0, 1)
    ),
    **dict.fromkeys(("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"), (1,)),
    "attention.causal": (True,),
    "expert_gating_func": (1,),  # softmax
    "use_parallel_residual": (False,),
    "rope.scaling.finetuned": (False, True),
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture of GGUF becomes one of transformers. `keys` must be in the file,
    `optional` ones need not. `settings` are what the format implies."""

    model_type: str
    keys: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rotates: tuple[str, ...] = ("default", "linear", "yarn", "longrope", "llama3")
    permutes: bool = False  # rows of queries and keys are in the order of Meta's rope
    adds_one: bool = False  # to the weights of norms
    transposes: bool = False  # linear weights, which are Conv1D's in transformers
    # The number of layers of the size whose attention is scaled by the width of its embedding.
    scaled_by_width: int | None = None


_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
ARCHITECTURES = {
    "llama": Architecture("llama", _DENSE, permutes=True),
    "qwen2": Architecture("qwen2", _DENSE, settings={"use_sliding_window": False}),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {**_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        settings={"norm_topk_prob": False, "use_sliding_window": False},
        neutral={"expert_weights_norm": (False,)},
    ),
    "qwen3": Architecture("qwen3", _DENSE, settings={"use_sliding_window": False}),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _EXPERTS,
        settings={"norm_topk_prob": True, "use_sliding_window": False},
        neutral={"expert_weights_norm": (True,)},
    ),
    "phi3": Architecture("phi3", _DENSE, optional=_WINDOW, rotates=("default", "longrope")),
    "gemma": Architecture("gemma", _DENSE, adds_one=True),
    "gemma2": Architecture(
        "gemma2", _DENSE, optional={**_WINDOW, **_SOFTCAPS}, adds_one=True, scaled_by_width=46
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {**_DENSE, **_WINDOW},
        optional=_SOFTCAPS,
        adds_one=True,
        scaled_by_width=62,
        rotates=("default", "linear", "yarn"),
    ),
    "gpt2": Architecture(
        "gpt2",
        {
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        transposes=True,
        rotates=(),
    ),
}


def read_config(file: GgufFile, num_tokens: int, ends: Mapping[str, Any]) -> tuple[str, Any]:
    """The file's architecture, a key of `ARCHITECTURES`, and transformers' config with the special
    tokens `ends`. Raises ModelError."""
    name = file.take("general.architecture", str)
    kind = file.take("general.type", str, "model")
    if name not in ARCHITECTURES or kind != "model":
        what = f"architecture {name}" if kind == "model" else f"type {kind}"
        raise file.refusal(f"is of {what}; served from GGUF are {', '.join(sorted(ARCHITECTURES))}")
    fields = _Fields(file, name, ARCHITECTURES[name])
    model_type, values = fields.values(num_tokens)
    try:
        config: Any = CONFIG_MAPPING[model_type](**values, **ends, vocab_size=num_tokens)
    except Exception as error:  # transformers' checks have no common root
        raise file.refusal(f"has fields that no {model_type} can have: {error}") from error
    return name, config


class _Fields:
    """Takes the fields of one architecture out of the file."""

    def __init__(self, file: GgufFile, name: str, row: Architecture) -> None:
        self._file, self._name, self._row = file, name, row

    def values(self, num_tokens: int) -> tuple[str, dict[str, Any]]:
        """transformers' name of the architecture, and the arguments of its config."""
        row, file = self._row, self._file
        model_type = row.model_type
        found = {to: self._above_zero(key) for key, to in row.keys.items()}
        context, width, blocks, heads = (
            found[row.keys[key]]
            for key in ("context_length", "embedding_length", "block_count", "attention.head_count")
        )
        if file.num_blocks != blocks:
            raise file.refusal(f"has tensors of {file.num_blocks} layers, and says {blocks}")
        if self._take("vocab_size", int, num_tokens) != num_tokens:
            raise file.refusal(f"lists {num_tokens} tokens, which is not its vocab_size")
        found |= {to: self._above_zero(key) for key, to in row.optional.items() if self._has(key)}
        shared = self._take("attention.head_count_kv", int, heads)
        head_dim = self._take("attention.key_length", int, width // heads)
        if self._take("attention.value_length", int, head_dim) != head_dim:
            raise self._cannot("attention.value_length")
        if row.rotates:
            found |= {"num_key_value_heads": shared, "head_dim": head_dim}
            found["rope_parameters"] = self._rope(head_dim, context, found)
        elif (shared, head_dim) != (heads, width // heads):
            raise self._cannot("attention.head_count_kv or key_length")
        found |= self._scale(head_dim, width // heads, blocks)
        if model_type == "llama":
            model_type, more = self._llama()
            found |= more
        for key, allowed in {**_NEUTRAL, **row.neutral}.items():
            if self._has(key) and self._take(key, (int, float, bool)) not in allowed:
                raise self._cannot(key)
        tied = not file.has("output.weight")
        return model_type, {**found, **row.settings, "tie_word_embeddings": tied}

    def _llama(self) -> tuple[str, dict[str, Any]]:
        """Which of transformers' architectures the file needs: GGUF names these alike."""
        has_bias = self._file.has("blk.0.attn_q.bias")
        window = self._take("attention.sliding_window", int, 0) or None
        if experts := self._take("expert_count", int, 0):
            used = self._above_zero("expert_used_count")
            more = {"num_local_experts": experts, "num_experts_per_tok": used}
            return "mixtral", {**more, "sliding_window": window}
        if window is not None:
            return "mistral", {"sliding_window": window}
        if has_bias and not self._file.has("blk.0.attn_output.bias"):
            return "qwen2", {"use_sliding_window": False}
        biases = {"attention_bias": has_bias, "mlp_bias": self._file.has("blk.0.ffn_up.bias")}
        return "llama", biases

    def _scale(self, head_dim: int, own: int, blocks: int) -> dict[str, Any]:
        """What scores are divided by the root of, if transformers' config says it."""
        says = self._row.scaled_by_width
        implied = own if blocks == says else head_dim
        scale = self._take("attention.scale", NUMBER, 0) or implied**-0.5
        squared = round(scale**-2)
        if not math.isclose(squared**-0.5, scale, rel_tol=1e-6) or (
            says is None and squared != head_dim
        ):
            raise self._cannot("attention.scale")
        return {} if says is None else {"query_pre_attn_scalar": squared}

    def _rope(self, head_dim: int, context: int, found: dict[str, Any]) -> dict[str, Any]:
        """transformers' `rope_parameters`."""
        dims = self._take("rope.dimension_count", int, head_dim)
        theta = float(self._take("rope.freq_base", NUMBER, 10000.0))
        parameters = {"rope_theta": theta, **self._scaling(theta, dims, context)}
        if parameters["rope_type"] not in self._row.rotates:
            raise self._cannot(f"rope scaling {parameters['rope_type']}")
        if self._row.model_type == "phi3":
            parameters["partial_rotary_factor"] = dims / head_dim
            found["original_max_position_embeddings"] = parameters.get(
                "original_max_position_embeddings", context
            )
        elif dims != head_dim:
            raise self._cannot("rope.dimension_count")
        if self._row.model_type != "gemma3_text":
            return parameters
        local = float(self._take("rope.freq_base_swa", NUMBER, 10000.0))
        sliding = {"rope_type": "default", "rope_theta": local}
        return {"full_attention": parameters, "sliding_attention": sliding}

    def _scaling(self, theta: float, dims: int, context: int) -> dict[str, Any]:
        """What stretches the frequencies. Factors in a tensor divide them one by one."""
        kind = self._take("rope.scaling.type", str, "linear")
        older = self._take("rope.scale_linear", NUMBER, 0)
        factor = self._take("rope.scaling.factor", NUMBER, 0) or older or 1
        original = self._take("rope.scaling.original_context_length", int, context)
        scores = float(self._take("rope.scaling.attn_factor", NUMBER, 1))
        betas = {
            f"beta_{end}": self._take(f"rope.scaling.yarn_beta_{end}", NUMBER, default)
            for end, default in (("fast", 32), ("slow", 1))
        }
        if older not in (0, factor) or factor < 1:
            raise self._cannot("rope.scaling.factor")
        plain = kind == "none" or (kind == "linear" and factor == 1)
        before = {"original_max_position_embeddings": original}
        if kind == "longrope" or (plain and self._file.has("rope_factors_long.weight")):
            tables = {
                f"{name}_factor": self._file.tensor(f"rope_factors_{name}.weight").tolist()
                for name in ("long", "short")
            }
            stretch = max(1.0, context / original)
            more = {"factor": stretch, "attention_factor": scores, **before, **tables}
            return {"rope_type": "longrope", **more}
        if kind == "yarn":
            scores *= 0.1 * math.log(factor) + 1
            more = {"factor": float(factor), "attention_factor": scores, **before, **betas}
            return {"rope_type": "yarn", **more}
        if scores != 1:
            raise self._cannot("rope.scaling.attn_factor")
        if plain and self._file.has("rope_freqs.weight"):
            return _by_frequency(self._file.tensor("rope_freqs.weight"), theta, dims, context)
        if kind not in ("linear", "none"):
            raise self._cannot(f"rope.scaling.type {kind}")
        if plain:
            return {"rope_type": "default"}
        return {"rope_type": "linear", "factor": float(factor)}

    def _has(self, key: str) -> bool:
        return self._file.has_field(f"{self._name}.{key}")

    def _take(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        return self._file.take(f"{self._name}.{key}", kind, default)

    def _above_zero(self, key: str) -> Any:
        whole = not key.endswith(("epsilon", "softcapping"))
        value = self._take(key, int if whole else NUMBER)
        if value <= 0:
            raise self._file.refusal(f"has {value} in the field {self._name}.{key}")
        return value

    def _cannot(self, what: str) -> ModelError:
        return self._file.refusal(
            f"sets {what} for {self._name} to what transformers' definition cannot express"
        )


def _by_frequency(
    table: NDArray[np.float32], theta: float, dims: int, context: int
) -> dict[str, Any]:
    """The rope that divides each frequency by the table's number. Llama 3.1's own kind if they are
    its numbers (arXiv 2407.21783, and its config.json), which are of two sizes."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, dims, 2) / dims)
    smooth = np.clip((_LLAMA3_CONTEXT / wavelengths - 1) / 3, 0, 1)
    factor = float(table.max(initial=1))
    expected = 1 / ((1 - smooth) / factor + smooth)
    if table.shape == expected.shape and np.allclose(table, expected, rtol=1e-5):
        before = {"original_max_position_embeddings": _LLAMA3_CONTEXT, "factor": factor}
        return {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **before}
    both = dict.fromkeys(("long_factor", "short_factor"), table.tolist())
    unscaled = {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0}
    return {**unscaled, "original_max_position_embeddings": context, **both}

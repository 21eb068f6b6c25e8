"""Every architecture that is held to transformers' tokens, as a tiny random model made from a seed.

`ARCHITECTURES` names transformers' model types and the models that people know them by. A row of
`docs/models.md` stands for each; `make models` writes them.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from engine.models.load import LoadedModel, describe
from engine.models.probe import NOTHING
from engine.models.towers import drop_towers, is_text_of
from tests.support.models import bytes_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
VOCAB_SIZE = 258
WINDOW = 24

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 256,
    "bos_token_id": 257,
    "pad_token_id": 256,
    "initializer_range": 0.2,
}
# What configs call the same things; each is given where the type's own config has it.
_ALSO: dict[str, Any] = {
    "sliding_window": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 64,
    "zero_expert_num": 2,
    "num_layers": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 64,
    "n_positions": 512,
    "ffn_dim": 64,
    "word_embed_proj_dim": 64,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_head_dim": 24,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_TOWER: dict[str, Any] = {  # what reads images or sound, of models whose text alone is served
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "out_hidden_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_layers": 1,
    "base_channels": 32,
    "num_blocks": 1,
    "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32,
    "nemo_conv_channels": 32,
    "nemo_final_size": 1,
}
_BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
_FOUR = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_PER_LAYER = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16}
_LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 1.3, 1.3],
        "long_factor": [1.0, 1.2, 2.0, 4.0, 8.0, 12.0, 16.0, 16.0],
        "short_mscale": 1.1,
        "long_mscale": 1.2,
    },
}

_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 3, 3],
    }
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_ZAMBA2 = {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "layer_types": ["mamba", "hybrid"] * 2,
}
_DECODER = {"is_decoder": True}
_VISION = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_AUDIO = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_blocks"),
    *("ext_pw_out_channel", "depthwise_separable_out_channel"),
    *("nemo_conv_channels", "nemo_final_size"),
)
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}

# By model type: what people know it by, and what its tiny config has besides.
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "afmoe": ("Arcee Trinity", _BOTH),
    "apertus": ("Apertus", {}),
    "aria_text": ("Aria, its text model", {}),
    "arcee": ("Arcee AFM", {}),
    "axk1": ("A.X K1", _LATENT),
    "bailing_hybrid": ("Ling, Ring 2.5 and 3", {**_LATENT, "layer_types": _DELTA["layer_types"]}),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "beam": ("Beam", {}),
    "bert": ("BERT as a decoder", _DECODER),
    "bert-generation": ("BERT for generation", _DECODER),
    "bitnet": ("BitNet b1.58", {}),
    "cohere": ("Command R", {}),
    "cohere2": ("Command A, Command R7B", _BOTH),
    "cohere2_moe": ("Command A MoE", _BOTH),
    "cohere2_vision": ("Command A Vision, its text", {**_BOTH}),
    "cohere_compass_text": (
        "Cohere Compass, its text model",
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    "ctrl": ("CTRL", {"dff": 64}),
    "cwm": ("CWM", _BOTH),
    "dbrx": (
        "DBRX",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {
                "hidden_size": 64,
                "ffn_hidden_size": 64,
                "moe_num_experts": 4,
                "moe_top_k": 2,
            },
        },
    ),
    "deepseek_v2": ("DeepSeek-V2, V2-Lite, Coder-V2", {**_LATENT, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepSeek-V3, R1, Kimi K2", _LATENT),
    "dots1": (
        "dots.llm1",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    ),
    "electra": ("ELECTRA as a decoder", _DECODER),
    "emu3": ("Emu3, its text", {}),
    "ernie": ("ERNIE as a decoder", _DECODER),
    "ernie4_5": ("ERNIE 4.5 dense", {}),
    "ernie4_5_moe": ("ERNIE 4.5", {}),
    "exaone4": ("EXAONE 4", _BOTH),
    "exaone4_5": ("EXAONE 4.5, its text", _BOTH),
    "exaone_moe": ("K-EXAONE", {}),
    "falcon_h1": ("Falcon-H1", {**_MAMBA, "mamba_d_ssm": 128}),
    "falcon_mamba": ("Falcon Mamba", {}),
    "flex_olmo": ("FlexOlmo", {}),
    "flint": ("Flint", {}),
    "fuyu": ("Fuyu, its text", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma 2", _BOTH),
    "gemma3": ("Gemma 3 with images, its text", _BOTH),
    "gemma3_text": ("Gemma 3", _BOTH),
    "gemma3n_text": (
        "Gemma 3n, its text model",
        {**_FOUR, **_PER_LAYER, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "gemma4": (
        "Gemma 4 with images, its text",
        {**_FOUR, **_PER_LAYER, "global_head_dim": 32},
    ),
    "gemma4_text": ("Gemma 4, its text model", {**_FOUR, **_PER_LAYER, "global_head_dim": 32}),
    "gemma4_unified": ("Gemma 4 Unified, its text", {**_BOTH, "global_head_dim": 32}),
    "gemma4_unified_text": ("Gemma 4 Unified, its text model", _BOTH),
    "glm": ("GLM-4 9B", {}),
    "glm4": ("GLM-4 32B", {}),
    "glm46v": ("GLM-4.6V-Flash, its text", _MROPE),
    "glm4_moe": ("GLM-4.5, 4.6, 4.7", {}),
    "glm4_moe_lite": ("GLM-4.7-Flash", _LATENT),
    "glm4v": ("GLM-4.1V, its text", _MROPE),
    "glm4v_moe": (
        "GLM-4.5V, 4.6V, their text",
        {"rope_parameters": {**_MROPE["rope_parameters"], "mrope_section": [1, 1, 2]}},
    ),
    "gpt2": ("GPT-2", {}),
    "gpt_bigcode": ("StarCoder, SantaCoder", {}),
    "gpt_neox": ("Pythia, GPT-NeoX", {}),
    "gpt_oss": (
        "gpt-oss",
        {**_BOTH, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "granite": ("Granite 3 and 4 dense", {}),
    "granite_swa": ("Granite with windows", {}),
    "granitemoe": ("Granite 3 MoE", {}),
    "granitemoe_swa": ("Granite MoE with windows", {}),
    "granitemoehybrid": (
        "Granite 4",
        {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "granitemoeshared": ("Granite MoE, shared experts", {}),
    "helium": ("Helium", {}),
    "hunyuan_v1_dense": ("Hunyuan dense", {}),
    "hunyuan_v1_moe": ("Hunyuan A13B", {}),
    "hy_v3": ("Hunyuan 3", {}),
    "hyperclovax": ("HyperCLOVA X", {}),
    "idefics3": ("Idefics3, SmolVLM, SmolDocling, Granite-Docling, their text", {}),
    "internlm3": ("InternLM 3", {}),
    "internvl": ("InternVL 3, its text", {}),
    "iquestcoder": ("IQuest-Coder", {}),
    "jais2": ("Jais 2", {}),
    "jamba": ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "jetmoe": ("JetMoE", {}),
    "kimi_k25": ("Kimi K2.5, its text", _LATENT),
    "kimi_linear": (
        "Kimi Linear",
        {
            **_LATENT,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 16,
        },
    ),
    "kolibri1": ("Kolibri 1", {}),
    "laguna": ("Laguna", {}),
    "lfm2": (
        "LFM2",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    ),
    "lfm2_moe": (
        "LFM2 MoE",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
        },
    ),
    "lfm2_vl": ("LFM2-VL, its text", {"layer_types": ["conv", "full_attention"]}),
    "lfm3": (
        "LFM3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
        },
    ),
    "llama": ("Llama 2 and 3, SmolLM 2, Yi, DeepSeek-R1-Distill-Llama", {}),
    "longcat_flash": ("LongCat-Flash", _LATENT),
    "mamba": ("Mamba", {}),
    "mamba2": (
        "Mamba 2, Codestral Mamba",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    ),
    "mellum": ("Mellum", {}),
    "mimo_v2_flash": ("MiMo-V2-Flash", {**_BOTH, "v_head_dim": 8}),
    "minicpm3": ("MiniCPM3", _LATENT),
    "minicpmv4_7": ("MiniCPM-V 4.7, its text", _DELTA),
    "minimax": (
        "MiniMax M1, Text-01",
        {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    ),
    "minimax_m2": ("MiniMax M2", {}),
    "ministral": ("Ministral", _BOTH),
    "ministral3": ("Ministral 3", {}),
    "mistral": ("Mistral 7B, Mistral Small", {}),
    "mistral3": ("Mistral Small 3.1 and 3.2, their text", {}),
    "mixtral": ("Mixtral", {}),
    "modernbert-decoder": ("ModernBERT decoder, Ettin", {}),
    "moshi": ("Moshi, its text model", {}),
    "moss_transcribe_diarize": ("MOSS Transcribe Diarize, its text", {}),
    "nanochat": ("nanochat", {}),
    "nemotron_h": (
        "Nemotron-H, Nemotron 3",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "moe", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
    ),
    "olmo": ("OLMo", {}),
    "olmo2": ("OLMo 2", {}),
    "olmo3": ("OLMo 3", _BOTH),
    "olmo_hybrid": ("OLMo Hybrid", _DELTA),
    "olmoe": ("OLMoE", {}),
    "opt": ("OPT", {}),
    "persimmon": ("Persimmon", {}),
    "phi": ("Phi-1, Phi-2", {}),
    "phi3": ("Phi-3, Phi-3.5, Phi-4, Phi-4-mini", _LONGROPE),
    "phi4_multimodal": (
        "Phi-4-multimodal, its text",
        {
            "vision_config": {name: _TOWER[name] for name in _VISION},
            "audio_config": {name: _TOWER[name] for name in _AUDIO},
        },
    ),
    "phimoe": ("Phi-3.5-MoE", _LONGROPE),
    "qwen2": ("Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen", {}),
    "qwen2_5_vl": ("Qwen2.5-VL, its text", _MROPE),
    "qwen2_moe": ("Qwen1.5-MoE, Qwen2-57B-A14B", {}),
    "qwen2_vl": ("Qwen2-VL, its text", _MROPE),
    "qwen3": ("Qwen3", {}),
    "qwen3_5": ("Qwen3.5, its text", _DELTA),
    "qwen3_5_moe": ("Qwen3.5 MoE, its text", _DELTA),
    "qwen3_5_moe_text": ("Qwen3.5 MoE, its text model", _DELTA),
    "qwen3_5_text": ("Qwen3.5, its text model", _DELTA),
    "qwen3_moe": ("Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder", {}),
    "qwen3_next": ("Qwen3-Next", _DELTA),
    "qwen3_vl": ("Qwen3-VL, its text", _MROPE),
    "qwen3_vl_moe": ("Qwen3-VL MoE, its text", _MROPE),
    "roc_bert": ("RoCBert as a decoder", _DECODER),
    "seed_oss": ("Seed-OSS", {}),
    "smollm3": ("SmolLM3", {}),
    "smolvlm": ("SmolVLM2, its text", {}),
    "solar_open": ("Solar Open", {}),
    "starcoder2": ("StarCoder2", {}),
    "step3p7": ("Step-3.7, its text", {**_BOTH, "sliding_window": WINDOW}),
    "vaultgemma": ("VaultGemma", _BOTH),
    "youtu": ("Youtu-LLM", _LATENT),
    "zamba": (
        "Zamba",
        {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    ),
    "zamba2": ("Zamba 2 with one group of heads", _ZAMBA2),
}


RECURRENT = frozenset(
    {
        *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
        *("kimi_linear", "mamba", "mamba2", "minicpmv4_7", "minimax", "nemotron_h"),
        *("olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
        *("qwen3_next", "zamba", "zamba2"),
    }
)  # of these, the ones with recurrent states: tests/parity/test_recurrent.py


_NO_INTERFACE = "does not support transformers' attention interface"
_BIDIRECTIONAL = "gives other logits with paged attention"
_OTHER_POSITIONS = {"is_decoder": True, "max_position_embeddings": 800}
_BOTH_WAYS = "is an encoder-decoder"
_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_SPARSE = "has a sparse index .* serve it with vLLM: --engine vllm, or --engine URL"

# Every other type that transformers calls a causal language model, by what its load says, and what
# its tiny config has; None for the type's own config, built without memory.
REFUSED: Mapping[str, tuple[str, Mapping[str, Any] | None]] = {
    **dict.fromkeys(
        (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart"),
            *("musicgen", "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet"),
            *("whisper",),
        ),
        (_BOTH_WAYS, None),
    ),
    **dict.fromkeys(
        (
            *("big_bird", "biogpt", "bloom", "blt", "codegen", "cpmant", "falcon", "git"),
            *("gpt_neo", "gpt_neox_japanese", "gptj", "megatron-bert", "mpt", "openai-gpt"),
            *("rembert", "roformer", "rwkv", "stablelm", "trocr", "xglm", "xlm", "xlnet"),
            *("xlstm",),
        ),
        (_NO_INTERFACE, None),
    ),
    **dict.fromkeys(
        (
            *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta"),
            *("xlm-roberta-xl",),
        ),
        (_BIDIRECTIONAL, _OTHER_POSITIONS),
    ),
    **dict.fromkeys(
        (
            *("axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4"),
            "minimax_m3_vl_text",
        ),
        (_SPARSE, None),
    ),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), (_SPARSE, _QWEN4)),
    "deepseek_v4": ("has compressed entries .* serve it with vLLM", None),
    **dict.fromkeys(("diffllama", "hrm_text", "recurrent_gemma"), ("its KV cannot be paged", {})),
    "doge": ("asks attention for attention_mask", {}),
    **dict.fromkeys(
        (*("gemma3n", "gemma4_assistant", "gemma4_unified_assistant"),),
        ("cannot be loaded", None),
    ),
    "got_ocr2": ("asks attention for logits_to_keep", {}),
    "inkling2_text": ("layers of kind hybrid_sliding", None),
    "inkling_text": ("layers of kind hybrid_sliding", None),
    "llama4": ("layers of kind chunked_attention", None),
    "llama4_text": ("layers of kind chunked_attention", None),
    "mllama": ("its KV cannot be paged", {"cross_attention_layers": [1]}),
    "nemotron": ("is not handed the arguments", {}),
    "reformer": (_NO_INTERFACE, {"is_decoder": True, "axial_pos_embds_dim": (32, 32)}),
    "xmod": (
        _BIDIRECTIONAL,
        {**_OTHER_POSITIONS, "default_language": "en_XX", "languages": ["en_XX"]},
    ),
    "zaya": ("cannot be run with paged attention", {"num_experts_per_tok": 1}),
}


def config_of(model_type: str) -> Any:
    """The tiny config of a model type."""
    _, own = ARCHITECTURES[model_type]
    return tiny_config(model_type, own)


def tiny_config(model_type: str, own: Mapping[str, Any]) -> Any:
    """A config of this type with small sizes, and what it has of its `own`."""
    config_class = CONFIG_MAPPING[model_type]
    whole = config_class()
    usual = whole.get_text_config()
    given = {**_SHAPE, **own}
    for name, value in _ALSO.items():
        if getattr(usual, name, None) is not None:
            given.setdefault(name, value)
    if usual is whole:
        return config_class(**given)
    towers = {
        part: {name: value for name, value in _TOWER.items() if hasattr(tower, name)}
        for part, tower in vars(whole).items()
        if isinstance(tower, PreTrainedConfig) and tower is not usual
    }
    towers |= {part: given.pop(part) for part in towers if part in given}
    return config_class(text_config=type(usual)(**given).to_dict(), **towers)


def stock(model_type: str) -> Any:
    """transformers' own model, neither packed nor paged."""
    config = config_of(model_type)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        seeing = is_text_of(config)
        kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
        model: Any = kind.from_config(config, dtype=torch.float32)
        if seeing:
            drop_towers(model)
        for name, parameter in model.named_parameters():
            if "sink" in name:
                torch.nn.init.normal_(parameter, 1.0)  # transformers leaves them near zero
    return model.eval().requires_grad_(False)


@lru_cache(maxsize=1)
def served(model_type: str) -> LoadedModel:
    """The same model, as the engine serves it."""
    return describe(
        f"tiny-{model_type}",
        stock(model_type),
        bytes_tokenizer(),
        weights_digest=xxhash.xxh3_128_digest(model_type.encode()),
        dtype="float32",
        device="cpu",
    )


# The page.


def row(loaded: LoadedModel) -> str:
    """The line of `docs/models.md` that a passing test stands for."""
    model_type = loaded.name.removeprefix("tiny-")
    known_as, _ = ARCHITECTURES[model_type]
    return f"| `{model_type}` | {known_as} | {_kept(loaded)} |"


def _kept(loaded: LoadedModel) -> str:
    if loaded.port is not None and loaded.layers == (NOTHING,):
        return "recurrent states alone"
    notes = []
    tokens = [each for each in loaded.layers if not each.rows]
    layers = [replace(each, window=None) for each in tokens]
    notes.append("latents" if layers[0].shared else "keys and values")
    if len({*layers}) > 1:
        notes[0] += " of several shapes"
    elif layers[0].key_dim != layers[0].value_dim and not layers[0].shared:
        notes[0] += " of two sizes"
    if len(tokens) < len(loaded.layers):
        notes.append("states of short convolutions")
    if loaded.port is not None:
        notes.append("recurrent states")
    config: Any = loaded.model.config.get_text_config()
    windows = getattr(config, "layer_types", None) or []
    if "sliding_attention" in windows:
        notes.append("windows" if len({*windows}) == 1 else "windows in some layers")
    elif getattr(config, "sliding_window", None):
        notes.append("windows")
    if any("sink" in name for name, _ in loaded.model.named_parameters()):
        notes.append("sinks")
    if any("experts" in name for name, _ in loaded.model.named_modules()):
        notes.append("experts")
    if "longrope" in str(getattr(config, "rope_parameters", "")):
        notes.append("LongRoPE")
    return ", ".join(notes)


_BEGIN, _END = "<!-- {} begins -->", "<!-- {} ends -->"


def between(text: str, name: str) -> str:
    """What the page has between the marks of a table."""
    return text.split(_BEGIN.format(name))[1].split(_END.format(name))[0].strip()


def write() -> None:
    """Write the table into the page, from models built and probed now."""
    text = PAGE.read_text(encoding="utf-8")
    heading = "| type | models | what a block keeps, and what is special |\n| --- | --- | --- |\n"
    table = "\n".join(row(served(each)) for each in ARCHITECTURES)
    begin, end = (mark.format("architectures") for mark in (_BEGIN, _END))
    before, after = text.split(begin)[0], text.split(end)[1]
    PAGE.write_text(f"{before}{begin}\n{heading}{table}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    write()

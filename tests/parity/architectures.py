"""Every architecture that is held to transformers' tokens, as a tiny random model made from a seed.

`ARCHITECTURES` names transformers' model types. A row of `docs/models.md` stands for each;
`make models` writes them, and keeps what the page says people know a type by.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from engine.models.load import LoadedModel
from engine.models.probe import NOTHING
from engine.models.towers import drop_towers, is_text_of
from tests.support.models import described

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
VOCAB_SIZE = 258
WINDOW = 24

_SHAPE: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("eos_token_id", "pad_token_id"), 256),
    "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 4,
    "head_dim": 16,
    "bos_token_id": 257,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
# What configs call the same things; each is given where the type's own config has it.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_head")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "zero_expert_num", "num_layers", "n_layer")
_INNER = ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size")
_WIDTHS = ("ffn_hidden_size", "n_embd", "n_inner", "ffn_dim", "word_embed_proj_dim")
_SINGLE = (
    *("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"),
    *("first_k_dense_replace", "decoder_sparse_step"),
)
_ALSO: dict[str, Any] = {
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_CHOSEN, 2),
    **dict.fromkeys(_INNER, 32),
    **dict.fromkeys(_WIDTHS, 64),
    **dict.fromkeys(_SINGLE, 1),
    "sliding_window": WINDOW,
    "n_positions": 512,
}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "num_key_value_heads": 4, "head_dim": 8}
_LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_head_dim": 24}
_WIDE = (
    *("hidden_size", "intermediate_size", "d_model", "encoder_ffn_dim", "base_channels"),
    *("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"),
)
_LAYERS = ("num_hidden_layers", "depth", "encoder_layers", "decoder_layers", "num_blocks")
_HEADS = ("num_attention_heads", "num_heads", "encoder_attention_heads")
_TOWER: dict[str, Any] = {  # what reads images or sound, of models whose text alone is served
    **dict.fromkeys(_WIDE, 32),
    **dict.fromkeys((*_LAYERS, "nemo_final_size"), 1),
    **dict.fromkeys(_HEADS, 2),
    "out_hidden_size": 64,
}
_BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
_FOUR = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_PER_LAYER = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16}
_GEMMA4 = {**_FOUR, **_PER_LAYER, "global_head_dim": 32}
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

_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_MROPE = {"rope_parameters": {**_DEFAULT, "mrope_section": [2, 3, 3]}}
_LINEAR = ["linear_attention", "full_attention"]
_DELTA: dict[str, Any] = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
_DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": _LINEAR}
_HYBRID = ["mamba", "hybrid"] * 2
_ZAMBA2 = {"num_hidden_layers": 4, "layers_block_type": _HYBRID, "layer_types": _HYBRID}
_DECODER = {"is_decoder": True}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
_KIMI = {"linear_num_heads": 4, "linear_head_dim": 16}
_CONV = ["conv", "full_attention", "conv"]
_VISION = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_AUDIO = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_blocks"),
    *("ext_pw_out_channel", "depthwise_separable_out_channel"),
    *("nemo_conv_channels", "nemo_final_size"),
)
_WIDTH = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}
_TWO_OF_FOUR = {"moe_num_experts": 4, "moe_top_k": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}

_PLAIN = """
    apertus aria_text arcee beam bitnet cohere emu3 ernie4_5 ernie4_5_moe exaone_moe falcon_mamba
    flex_olmo flint fuyu gemma glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox granite granite_swa
    granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3
    hyperclovax idefics3 internlm3 internvl iquestcoder jais2 jetmoe kolibri1 laguna llama mamba
    mellum minimax_m2 ministral3 mistral mistral3 mixtral modernbert-decoder moshi
    moss_transcribe_diarize nanochat olmo olmo2 olmoe opt persimmon phi qwen2 qwen2_moe qwen3
    qwen3_moe seed_oss smollm3 smolvlm solar_open starcoder2
"""
_WINDOWED = """
    afmoe cohere2 cohere2_moe cohere2_vision cwm exaone4 exaone4_5 gemma2 gemma3 gemma3_text
    gemma4_unified_text ministral olmo3 vaultgemma
"""
_LATENT_ONES = "axk1 deepseek_v3 glm4_moe_lite kimi_k25 longcat_flash minicpm3 youtu"
_DELTAS = """
    minicpmv4_7 olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next
"""
_SEEING = "glm46v glm4v qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe"

# By model type, what its tiny config has besides. What people know a type by is in the page.
_OWN: Mapping[str, Mapping[str, Any]] = {
    **{each: {} for each in _PLAIN.split()},
    **dict.fromkeys(_WINDOWED.split(), _BOTH),
    **dict.fromkeys(_LATENT_ONES.split(), _LATENT),
    **dict.fromkeys(_DELTAS.split(), _DELTA),
    **dict.fromkeys(("bert", "bert-generation", "electra", "ernie", "roc_bert"), _DECODER),
    **dict.fromkeys(_SEEING.split(), _MROPE),
    **dict.fromkeys(("phi3", "phimoe"), _LONGROPE),
    **dict.fromkeys(("gemma4", "gemma4_text"), _GEMMA4),
    "bailing_hybrid": {**_LATENT, "layer_types": _LINEAR},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _DEFAULT}},
    "ctrl": {"dff": 64},
    "dbrx": {
        **_WIDTH,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, **_TWO_OF_FOUR},
    },
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "gemma3n_text": {**_FOUR, **_PER_LAYER, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_unified": {**_BOTH, "global_head_dim": 32},
    "glm4v_moe": {"rope_parameters": {**_DEFAULT, "mrope_section": [1, 1, 2]}},
    "gpt_oss": {**_BOTH, "rope_parameters": _DEFAULT},
    "granitemoehybrid": {**_MAMBA, "layer_types": _LINEAR},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_LATENT, **_KIMI, "layer_types": _LINEAR},
    "lfm2": {"num_hidden_layers": 4, "layer_types": [*_CONV[:3], "conv"]},
    "lfm2_moe": {"num_hidden_layers": 3, "num_dense_layers": 1, "layer_types": _CONV[:3]},
    "lfm2_vl": {"layer_types": _CONV[:2]},
    "lfm3": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "mimo_v2_flash": {**_BOTH, "v_head_dim": 8},
    "minimax": {"layer_types": _LINEAR, "block_size": 16},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
        **_NEMOTRON,
    },
    "phi4_multimodal": {
        "vision_config": {name: _TOWER[name] for name in _VISION},
        "audio_config": {name: _TOWER[name] for name in _AUDIO},
    },
    "step3p7": {**_BOTH, "sliding_window": WINDOW},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": _HYBRID},
    "zamba2": _ZAMBA2,
}
ARCHITECTURES = dict(sorted(_OWN.items()))

# Of these, the ones with recurrent states: tests/parity/test_recurrent.py.
_RECURRENT = """
    bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear mamba mamba2
    minicpmv4_7 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
    qwen3_next zamba zamba2
"""
RECURRENT = frozenset(_RECURRENT.split())

_NO_INTERFACE = "does not support transformers' attention interface"
_BIDIRECTIONAL = "gives other logits with paged attention"
_LANGUAGES = {"default_language": "en_XX", "languages": ["en_XX"]}
_OTHER_POSITIONS = {"is_decoder": True, "max_position_embeddings": 800}
_QWEN4 = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
_QWEN4 |= {"indexer_budget": 8, "indexer_compress_ratio": 2}
_ENCODING = """
    bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp
    pegasus plbart prophetnet whisper
"""
_OWN_ATTENTION = """
    big_bird biogpt bloom blt codegen cpmant falcon git gpt_neo gpt_neox_japanese gptj megatron-bert
    mpt openai-gpt rembert roformer rwkv stablelm trocr xglm xlm xlnet xlstm
"""
_SHIFTED = "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl"
_INDEXED = """
    axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text
"""
_SPARSE = "has a sparse index .* serve it with vLLM: --engine vllm, or --engine URL"

# Every other type that transformers calls a causal language model, by what its load says, and what
# its tiny config has; None for the type's own config, built without memory.
REFUSED: Mapping[str, tuple[str, Mapping[str, Any] | None]] = {
    **dict.fromkeys(_ENCODING.split(), ("is an encoder-decoder", None)),
    **dict.fromkeys(_OWN_ATTENTION.split(), (_NO_INTERFACE, None)),
    **dict.fromkeys(_SHIFTED.split(), (_BIDIRECTIONAL, _OTHER_POSITIONS)),
    **dict.fromkeys(_INDEXED.split(), (_SPARSE, None)),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), (_SPARSE, _QWEN4)),
    "deepseek_v4": ("has compressed entries .* serve it with vLLM", None),
    **dict.fromkeys(("diffllama", "hrm_text", "recurrent_gemma"), ("its KV cannot be paged", {})),
    "doge": ("asks attention for attention_mask", {}),
    **dict.fromkeys(
        ("gemma3n", "gemma4_assistant", "gemma4_unified_assistant"), ("cannot be loaded", None)
    ),
    "got_ocr2": ("asks attention for logits_to_keep", {}),
    **dict.fromkeys(("inkling2_text", "inkling_text"), ("layers of kind hybrid_sliding", None)),
    **dict.fromkeys(("llama4", "llama4_text"), ("layers of kind chunked_attention", None)),
    "mllama": ("its KV cannot be paged", {"cross_attention_layers": [1]}),
    "nemotron": ("is not handed the arguments", {}),
    "reformer": (_NO_INTERFACE, {"is_decoder": True, "axial_pos_embds_dim": (32, 32)}),
    "xmod": (_BIDIRECTIONAL, _OTHER_POSITIONS | _LANGUAGES),
    "zaya": ("cannot be run with paged attention", {"num_experts_per_tok": 1}),
}


def config_of(model_type: str) -> Any:
    """The tiny config of a model type."""
    return tiny_config(model_type, ARCHITECTURES[model_type])


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
    return described(f"tiny-{model_type}", stock(model_type))


# The page.


def row(loaded: LoadedModel) -> str:
    """The line of `docs/models.md` that a passing test stands for."""
    model_type = loaded.name.removeprefix("tiny-")
    page = between(PAGE.read_text(encoding="utf-8"), "architectures")
    [known_as] = re.findall(rf"^\| `{model_type}` \| (.+?) \|", page, re.M) or ["?"]
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

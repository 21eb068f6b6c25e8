"""Tiny models and tokenizers, built in code from a seed. Nothing is downloaded.

For the tests of every package. The models are transformers' own classes of several architectures,
with a few thousand weights each. The tokenizer's tokens are single bytes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import xxhash
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.batch import Batch, Span
from engine.execution.runner import ModelRunner
from engine.models.load import LoadedModel, describe
from engine.operators.library import Operators
from engine.request import SamplingParams
from engine.text.tokenizer import Tokenizer
from tiers.blocks.layout import torch_dtype

EOS, IM_START = 256, 257
VOCAB_SIZE = 258  # 256 bytes, <|im_end|>, <|im_start|>

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,  # groups of three, as in the default model
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": EOS,
    "initializer_range": 0.2,  # so large that greedy tokens vary with the context
}
_LONGROPE: dict[str, Any] = {  # as Phi-3-128k: short tables up to 64 tokens, long ones beyond
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 1.3, 1.3],
        "long_factor": [1.0, 1.2, 2.0, 4.0, 8.0, 12.0, 16.0, 16.0],
    },
}
_CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**_SHAPE, use_sliding_window=False),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE),
    "mistral": lambda: transformers.MistralConfig(**_SHAPE, sliding_window=40),
    "phi3": lambda: transformers.Phi3Config(**{**_SHAPE, "hidden_size": 96}, **_LONGROPE),
    "gemma2": lambda: transformers.Gemma2Config(
        **_SHAPE, sliding_window=24, query_pre_attn_scalar=16
    ),
}
ARCHITECTURES = tuple(_CONFIGS)


def bytes_tokenizer() -> Tokenizer:
    """A tokenizer whose token n is the byte n, with two special tokens for the chat template."""
    return Tokenizer(_bytes_tokenizer())


def described(
    name: str,
    model: Any,
    *,
    contents: str = "",
    device: str = "cpu",
    operators: Operators | None = None,
) -> LoadedModel:
    """A model of bytes, transformers' own, checked and packed like one in `load_model`; its weights
    have the digest of these contents."""
    return describe(
        name,
        model.eval().requires_grad_(False),
        bytes_tokenizer(),
        weights_digest=xxhash.xxh3_128_digest((contents or name).encode()),
        dtype=str(model.dtype).removeprefix("torch."),
        device=device,
        operators=operators,
    )


def tiny_model(
    architecture: str = "llama", *, seed: int = 0, dtype: str = "float32"
) -> LoadedModel:
    """A seeded model on the CPU.

    `architecture` is one of `ARCHITECTURES`. Mistral and Gemma 2 attend through sliding windows,
    Gemma 2 with capped scores.
    """
    contents = f"tiny-{architecture}-{seed}" + ("" if dtype == "float32" else f"-{dtype}")
    model = stock_model(architecture, seed).to(torch_dtype(dtype))
    return described(f"tiny-{architecture}", model, contents=contents)


def save_tiny_model(
    folder: Path, architecture: str = "llama", *, seed: int = 0, **shape: int
) -> None:
    """Write a tiny model in the form users have on disk: config, safetensors, tokenizer. `shape`
    replaces fields of its config."""
    # Not `tiny_model`'s weights: packed, they have no names for a checkpoint.
    save_model(folder, stock_model(architecture, seed, **shape))


def save_model(folder: Path, model: Any) -> None:
    """Write a model of bytes, transformers' own, with its tokenizer."""
    model.save_pretrained(folder)
    _bytes_tokenizer().save_pretrained(folder)


# For a model whose KV is large, 32 KiB a token, and that computes in no time.
LARGE_KV = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8} | {
    "head_dim": 64
}


def save_adapter(folder: Path, model: Any, *, seed: int = 0, **config: Any) -> None:
    """Write a random LoRA adapter for `model` (transformers' own, unpacked), as saved by peft.

    `config` holds fields of peft's LoraConfig. Both matrices are random, so the adapter changes
    answers. The model itself is left unchanged.
    """
    from peft import LoraConfig, get_peft_model

    given = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], **config}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(init_lora_weights=False, **given))
    adapted.save_pretrained(folder)
    adapted.unload()


def save_tiny_adapter(
    folder: Path, architecture: str = "llama", *, seed: int = 0, **config: Any
) -> None:
    """Write a random LoRA adapter for the tiny model of that architecture."""
    save_adapter(folder, stock_model(architecture), seed=seed, **config)


def new_pool(loaded: LoadedModel, num_blocks: int, block_size: int = 16) -> torch.Tensor:
    """A device pool for `loaded`, filled with NaN so that reading unwritten rows shows."""
    layout = loaded.layout(block_size)
    return torch.full((num_blocks, *layout.shape), torch.nan, dtype=layout.torch_dtype)


def stock_model(architecture: str = "llama", seed: int = 0, **shape: int) -> Any:
    """transformers' own model with the weights of `tiny_model`, neither packed nor paged."""
    config = _CONFIGS[architecture]()
    config.update(shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def greedy_tokens(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    """transformers' own, with the whole computed for every token."""
    ids = torch.tensor([list(tokens)])
    for _ in range(count):
        best = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, best[None]], 1)
    found: list[int] = ids[0, len(tokens) :].tolist()
    return found


def generated(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int] | NDArray[np.int32]],
    count: int,
    *,
    chunk: int = 1000,
    computed: int = 0,
    end: int | None = None,
    adapters: Sequence[str | None] = (),
    tables: Sequence[list[int]] = (),
    number: int = 1,
) -> list[list[int]]:
    """Greedy tokens of prompts that are computed beside each other in every step, in chunks; up to
    `count` or the token `end`. The first `computed` positions stand in the pool. The first has this
    `number`, and if no `tables` are given, the first ten blocks."""
    params, numbers = SamplingParams(temperature=0), range(len(prompts))
    tokens = [[*map(int, prompt)] for prompt in prompts]
    found, done = [list[int]() for _ in prompts], [computed for _ in prompts]
    while live := [n for n in numbers if len(found[n]) < count and end not in found[n]]:
        spans = []
        for n in live:
            part = tokens[n][done[n] : done[n] + chunk]
            span = Span(
                number + n,
                np.array(part, np.int32),
                done[n],
                tables[n] if tables else list(range(10 * n, 10 * n + 10)),
                done[n] + len(part) == len(tokens[n]),
                params,
                num_prompt_tokens=len(prompts[n]),
                adapter=adapters[n] if adapters else None,
            )
            spans.append(span)
            done[n] += len(part)
        for n, sampled in zip(live, runner.step(Batch(spans)), strict=True):
            if sampled.token is not None:
                tokens[n].append(sampled.token)
                found[n].append(sampled.token)
    for n in numbers:
        runner.forget(number + n)
    return found


def _bytes_tokenizer(more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    alphabet = _byte_characters()
    vocabulary = {character: byte for byte, character in enumerate(alphabet)}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    for token in ("<|im_end|>", "<|im_start|>", *more):
        fast.add_tokens([AddedToken(token, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )


def _byte_characters() -> list[str]:
    """The character for each byte in byte-level BPE."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(one) if one in printable else chr(256 + others.index(one)) for one in range(256)]

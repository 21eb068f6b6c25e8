"""GGUF files: dequantised once into a folder of safetensors, a config and a tokenizer.

`engine.models.load` calls `convert` at start-up, on the thread that starts the server. Weights go
through transformers' GGUF support. The tokenizer does not: it is rebuilt here from the file's own
fields, because the conversion in transformers loses the pre-tokenizer and moves the special tokens.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoModelForCausalLM
from transformers import modeling_gguf_pytorch_utils as modeling_gguf

from engine.errors import ModelError

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

DEQUANTISING = "dequantising the weights"
FORMAT = "v1"  # of the folder below; raise it when `convert` writes something else
CONTROL_TOKEN, USER_TOKEN = 3, 4  # values of `tokenizer.ggml.token_type`

# The splits that come before byte-level BPE, by `tokenizer.ggml.pre`. Sources: llama.cpp
# `src/llama-vocab.cpp` (names) and the `tokenizer.json` of the models named.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[bool, str]] = {  # (individual digits first, pattern)
    "smollm": (True, _GPT2),  # HuggingFaceTB/SmolLM2-135M-Instruct
    "gpt-2": (False, _GPT2),
    "llama-bpe": (False, _LLAMA3),  # meta-llama/Meta-Llama-3-8B
    "llama3": (False, _LLAMA3),
    "qwen2": (False, _QWEN2),  # Qwen/Qwen2-7B, Qwen/Qwen3-8B
}


def converted_folder(cache_dir: Path, digest: bytes) -> Path:
    """Where the conversion of the GGUF file with these contents lies."""
    return cache_dir / f"gguf-{FORMAT}-{digest.hex()}"


def convert(path: Path, folder: Path, progress: Progress) -> None:
    """Write `folder` (config, safetensors, tokenizer) from the GGUF file at `path`.

    Written beside and renamed into place, so a reader sees all of it or none; of two processes that
    convert at once, one wins and both find the same contents.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        progress("reading the GGUF file", 0.0)
        fields = _read_fields(path)
        tokenizer = build_tokenizer(fields)
        progress(DEQUANTISING, 0.1)
        with _counting(progress, 0.1, 0.7):
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            )
        progress("writing safetensors", 0.7)
        _save_model(model, fields, partial)
        progress("writing the tokenizer", 0.95)
        _save_tokenizer(tokenizer, fields, partial)
        _move(partial, folder)
        progress("ready", 1.0)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _counting(progress: Progress, start: float, end: float) -> Iterator[None]:
    """Tell the tensors that transformers dequantises, where it would draw a bar of its own."""

    def count(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        for number, tensor in enumerate(tensors):
            progress(DEQUANTISING, start + (end - start) * number / len(tensors))
            yield tensor

    bar, modeling_gguf.tqdm = modeling_gguf.tqdm, count
    try:
        yield
    finally:
        modeling_gguf.tqdm = bar


def build_tokenizer(fields: Mapping[str, Any]) -> FastTokenizer:
    """A byte-level BPE tokenizer from a GGUF file's `tokenizer.*` fields.

    Raises ModelError where the file's tokenizer is of another kind.
    """
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _SPLITS:
        raise ModelError(
            f"the GGUF file's tokenizer ({kind}, pre-tokenizer {pre}) is not supported; supported "
            f"are byte-level BPE with {', '.join(sorted(_SPLITS))}; give the model as a folder "
            f"with safetensors and tokenizer.json instead"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = FastTokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    )
    digits_first, pattern = _SPLITS[pre]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits_first else []
    steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for token, type_ in zip(tokens, types, strict=True):
        if type_ in (CONTROL_TOKEN, USER_TOKEN):
            tokenizer.add_tokens(
                [AddedToken(token, special=type_ == CONTROL_TOKEN, normalized=False)]
            )
    return tokenizer


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        # Only a GGUF file needs it: machines that serve safetensors may lack the package.
        from gguf import GGUFReader

        reader = GGUFReader(path)
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
    return {name: field.contents() for name, field in reader.fields.items()}


def _save_model(model: Any, fields: Mapping[str, Any], folder: Path) -> None:
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # what is saved is plain float32
    eos = fields.get("tokenizer.ggml.eos_token_id")
    config.bos_token_id = None  # whether one is prepended is the tokenizer's matter
    config.eos_token_id = eos
    config.pad_token_id = fields.get("tokenizer.ggml.padding_token_id", eos)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # a tied head is the embedding; it is stored once
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _save_tokenizer(tokenizer: FastTokenizer, fields: Mapping[str, Any], folder: Path) -> None:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    named = {
        name: tokens[fields[key]]
        for name, key in (
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        )
        if key in fields
    }
    if fields.get("tokenizer.ggml.add_bos_token", False):
        named["bos_token"] = tokens[fields["tokenizer.ggml.bos_token_id"]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": "bos_token" in named,
        "model_max_length": fields.get(f"{fields['general.architecture']}.context_length"),
        **named,
    }
    template = fields.get("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = template
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1, sort_keys=True))


def _move(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / "tokenizer.json").exists():
            raise
        logger.info("another process converted %s first", folder.name)

"""Dequantises a GGUF file once, into a folder of safetensors, a config and a tokenizer.

    GgufFile ─► gguf_tokenizer ─► tokenizer.json
             ─► gguf_config ─► config.json ─► which weights, in what shape ─► model.safetensors

`engine.models.files` calls `convert` at start-up, on the thread that starts the server. Every field
and tensor is used, or known to have no effect, or refuses the file.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoModelForCausalLM

from engine.errors import ModelError
from engine.models.gguf_config import ARCHITECTURES, Architecture, read_config
from engine.models.gguf_file import GgufFile
from engine.models.gguf_tokenizer import (
    bos_token,
    build_tokenizer,
    chat_templates,
    end_tokens,
    take_tokenizer,
)
from engine.partial import partial_folder

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

CONVERTED = "gguf-"  # how the name of a converted folder begins
DEQUANTISING = "dequantising the weights"
FORMAT = "v3"  # of the converted folder; raise it when the output of `convert` changes


def converted_folder(cache_dir: Path, digest: bytes) -> Path:
    """The folder of the converted GGUF file with these contents."""
    return cache_dir / f"{CONVERTED}{FORMAT}-{digest.hex()}"


def convert_again(folder: Path) -> str:
    """What to do, as the end of an error about a model's damaged folder, if it is a converted one;
    else empty."""
    if not re.fullmatch(f"{CONVERTED}{FORMAT}-[0-9a-f]+(-text)?", folder.name):
        return ""
    return f"; remove the folder {folder}, and the next start converts the model again"


def convert(
    paths: Sequence[Path], folder: Path, progress: Progress, *, weights: bool = True
) -> None:
    """Write `folder` (config, safetensors, tokenizer) from all GGUF files of a model. Without
    `weights` it is of the text alone, and tensors are not looked at.

    It is written under another name and renamed into place, so a reader sees all of it or nothing.
    If two processes convert at once, one wins and both find the same contents. Raises ModelError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with partial_folder(folder, CONVERTED) as partial:
        progress("reading the GGUF file", 0.0)
        file = GgufFile(paths)
        fields = take_tokenizer(file)
        try:
            tokenizer = build_tokenizer(fields)
        except Exception as error:  # tokenizers' errors are of the root class
            raise file.refusal(f"has no usable tokenizer: {error}") from error
        ends = end_tokens(fields)
        pad = fields.get("tokenizer.ggml.padding_token_id", ends[0])
        special = {"bos_token_id": None, "eos_token_id": ends[0], "pad_token_id": pad}
        name, config = read_config(file, len(fields["tokenizer.ggml.tokens"]), special)
        config.dtype = "float32"
        if weights:
            tensors = _weights(file, name, config, progress)
            file.refuse_rest(name)
            progress("writing safetensors", 0.7)
            _save_weights(tensors, partial)
        config.save_pretrained(partial)
        progress("writing the tokenizer", 0.95)
        _save_tokenizer(tokenizer, fields, config.max_position_embeddings, partial)
        (partial / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        _move(partial, folder)
        progress("ready", 1.0)


def _weights(
    file: GgufFile, architecture: str, config: Any, progress: Progress
) -> dict[str, NDArray[np.float32]]:
    """What the config's model needs, by transformers' names. Raises ModelError if one is missing or
    has another shape."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    wanted = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" or not config.tie_word_embeddings
    }
    table = _names(architecture, config.num_hidden_layers)
    found = {}
    for number, (name, shape) in enumerate(wanted.items()):
        progress(DEQUANTISING, 0.1 + 0.6 * number / len(wanted))
        theirs = _theirs(name, table)
        parts = [file.tensor(each) for each in theirs]
        tensor = np.concatenate(parts, axis=1) if parts[1:] else parts[0]
        tensor = _in_our_order(tensor, theirs[0], ARCHITECTURES[architecture], config)
        if tensor.shape != shape:
            raise file.refusal(
                f"has {theirs[0]} in the shape {list(tensor.shape)}, and its fields ask for "
                f"{list(shape)}"
            )
        found[name] = np.ascontiguousarray(tensor)
    return found


def _names(architecture: str, num_blocks: int) -> Any:
    """gguf's table from transformers' names to its own."""
    import gguf

    (number,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(number, num_blocks)


def _theirs(name: str, table: Any) -> list[str]:
    """The tensors of the file that make up one of transformers'."""
    if name == "lm_head.weight":
        return ["output.weight"]
    experts = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.gate_up_proj", name)
    if experts:
        return [f"blk.{experts[1]}.ffn_{half}_exps.weight" for half in ("gate", "up")]
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return [found if found.endswith((".weight", ".bias")) else f"{found}.weight"]


def _in_our_order(
    tensor: NDArray[np.float32], name: str, row: Architecture, config: Any
) -> NDArray[np.float32]:
    """The tensor as transformers stores it."""
    if row.permutes and (own := re.search(r"\.attn_([qk])\.", name)):
        heads = config.num_attention_heads if own[1] == "q" else config.num_key_value_heads
        if len(tensor) == heads * config.head_dim:
            pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
            return pairs.swapaxes(1, 2).reshape(tensor.shape)
    if row.adds_one and name.endswith("norm.weight"):
        return tensor - 1
    if row.transposes and name.startswith("blk.") and tensor.ndim == 2:
        return tensor.T
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return tensor.reshape(1, -1)
    return tensor


def _save_weights(weights: Mapping[str, NDArray[np.float32]], folder: Path) -> None:
    try:
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        mib = sum(tensor.nbytes for tensor in weights.values()) / 2**20
        raise ModelError(
            f"the weights, {mib:,.0f} MiB in float32, cannot be written to {folder.parent}: {error}"
            "; free some room there, or name another folder with --data-dir"
        ) from error


def _save_tokenizer(
    tokenizer: FastTokenizer, fields: Mapping[str, Any], max_context: int, folder: Path
) -> None:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    places = {"eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    keys = {name: f"tokenizer.ggml.{place}_token_id" for name, place in places.items()}
    named = {name: tokens[fields[key]] for name, key in keys.items() if key in fields}
    if (bos := bos_token(fields)) is not None:
        named["bos_token"] = bos
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": "bos_token" in named,
        "model_max_length": max_context,
        **named,
    }
    if templates := chat_templates(fields):
        settings["chat_template"] = templates
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1, sort_keys=True))


def _move(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / "tokenizer.json").exists():
            raise
        logger.info("another process converted %s first", folder.name)

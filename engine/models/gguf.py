"""Dequantises a GGUF file once, into a folder of safetensors, a config and a tokenizer.

`engine.models.load` calls `convert` at start-up, on the thread that starts the server. Weights go
through transformers' GGUF support. The tokenizer does not: see `gguf_tokenizer`.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoModelForCausalLM
from transformers import modeling_gguf_pytorch_utils as modeling_gguf

from engine.errors import ModelError
from engine.models.gguf_tokenizer import bos_token, build_tokenizer
from engine.partial import partial_folder

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

CONVERTED = "gguf-"  # how the name of a converted folder begins
DEQUANTISING = "dequantising the weights"
FORMAT = "v2"  # of the converted folder; raise it when the output of `convert` changes


def converted_folder(cache_dir: Path, digest: bytes) -> Path:
    """The folder of the converted GGUF file with these contents."""
    return cache_dir / f"{CONVERTED}{FORMAT}-{digest.hex()}"


def convert_again(folder: Path) -> str:
    """What to do, as the end of an error about a model's damaged folder, if it is a converted one;
    else empty."""
    if not re.fullmatch(f"{CONVERTED}{FORMAT}-[0-9a-f]+", folder.name):
        return ""
    return f"; remove the folder {folder}, and the next start converts the model again"


def convert(path: Path, folder: Path, progress: Progress) -> None:
    """Write `folder` (config, safetensors, tokenizer) from the GGUF file at `path`.

    It is written under another name and renamed into place, so a reader sees all of it or nothing.
    If two processes convert at once, one wins and both find the same contents.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with partial_folder(folder, CONVERTED) as partial:
        progress("reading the GGUF file", 0.0)
        reader = _read(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tokenizer = build_tokenizer(fields)
        progress(DEQUANTISING, 0.1)
        with _counting(progress, 0.1, 0.7), _read_once(reader):
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            )
        progress("writing safetensors", 0.7)
        _save_model(model, fields, partial)
        progress("writing the tokenizer", 0.95)
        _save_tokenizer(tokenizer, fields, partial)
        _move(partial, folder)
        progress("ready", 1.0)


@contextmanager
def _counting(progress: Progress, start: float, end: float) -> Iterator[None]:
    """Report the tensors that transformers dequantises, instead of its own progress bar."""

    def count(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        for number, tensor in enumerate(tensors):
            progress(DEQUANTISING, start + (end - start) * number / len(tensors))
            yield tensor

    bar, modeling_gguf.tqdm = modeling_gguf.tqdm, count
    try:
        yield
    finally:
        modeling_gguf.tqdm = bar


def _read(path: Path) -> Any:
    """The file's fields and tensors. Raises ModelError if it cannot be read."""
    # Only a GGUF file needs it. Machines that serve safetensors may lack the package.
    from gguf import GGUFReader

    class PlainReader(GGUFReader):  # type: ignore[misc]  # it is untyped
        """Slices plain arrays. From a memory map, each string of a vocabulary takes five times as
        long."""

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = np.asarray(mapped)

    try:
        return PlainReader(path)
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error


@contextmanager
def _read_once(reader: Any) -> Iterator[None]:
    """Halve the time of a conversion. transformers gets `reader`, where it would read the file
    twice more, and one table of names, where it would make one per module."""
    import gguf

    make_reader, make_names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = lambda path: reader, cache(make_names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = make_reader, make_names


def _save_model(model: Any, fields: Mapping[str, Any], folder: Path) -> None:
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the saved weights are plain float32
    eos = fields.get("tokenizer.ggml.eos_token_id")
    config.bos_token_id = None  # the tokenizer decides whether to prepend one
    config.eos_token_id = eos
    config.pad_token_id = fields.get("tokenizer.ggml.padding_token_id", eos)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # a tied head is the embedding, stored once
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.contiguous()
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        mib = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
        raise ModelError(
            f"the weights, {mib:,.0f} MiB in float32, cannot be written to {folder.parent}: {error}"
            "; free some room there, or name another folder with --data-dir"
        ) from error


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
    if (bos := bos_token(fields)) is not None:
        named["bos_token"] = bos
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

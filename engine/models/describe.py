"""Reads a model's text side from its folder, without weights, for an engine that loads those.

Called at start-up by a server whose engine is vLLM. `engine.models.load` shares the tokenizer.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from engine.errors import ModelError
from engine.models.files import find
from engine.models.gguf import convert_again
from engine.text.tokenizer import Tokenizer


class Speaking(Protocol):
    """A model's tokenizer and vocabulary."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...


@dataclass(frozen=True, slots=True)
class Spoken:
    """A model's folder and its vocabulary."""

    folder: Path
    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: frozenset[int]


def describe_folder(
    name: str,
    cache_dir: Path,
    progress: Callable[[str, float], None] | None = None,
    *,
    text_alone: bool = False,
) -> Spoken:
    """Find the model `name` like `engine.models.load.load_model`. With `text_alone` nobody loads
    weights from the folder, so that of a GGUF file none are written. Raises ModelError."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    report = progress or (lambda what, fraction: None)
    folder = find(name, cache_dir, report, weights=False, text_alone=text_alone)
    tokenizer = load_tokenizer(folder)
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text_config = config.get_text_config()
    except Exception as error:  # transformers' errors have no common root
        raise ModelError(f"{folder} holds no usable config.json: {error}") from error
    ends = _ends(folder, tokenizer) or _as_set(text_config.eos_token_id)
    return Spoken(folder, tokenizer, text_config.vocab_size, ends)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder. Raises ModelError if it is not supported."""
    try:
        base = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers' and tokenizers' errors have no common root
        why = " ".join(str(error).split())
        raise ModelError(
            f"{folder} holds no usable tokenizer: {why}{convert_again(folder)}"
        ) from error
    written = folder / "chat_template.json"  # where image processors first stored it
    if getattr(base, "chat_template", None) is None and written.exists():
        try:
            base.chat_template = str(json.loads(written.read_bytes())["chat_template"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{written} holds no chat template: {error}") from error
    return Tokenizer(base)


def _ends(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end an answer, from the generation config and the tokenizer."""
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # there is no generation config
        generation = None
    return _as_set(getattr(generation, "eos_token_id", None)) | _as_set(tokenizer.eos_token_id)


def _as_set(ids: Any) -> frozenset[int]:
    return frozenset([ids] if isinstance(ids, int) else ids or ())

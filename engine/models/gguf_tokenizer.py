"""A tokenizer rebuilt from the `tokenizer.*` fields of a GGUF file.

transformers' own conversion loses the pre-tokenizer and moves the special tokens. Two kinds are
supported: byte-level BPE, whose merges the file lists and whose splits it names, and SentencePiece,
whose pieces have scores. Ids equal those of llama.cpp for the same file.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from engine.errors import ModelError
from engine.models.gguf_file import GgufFile

# Values of `tokenizer.ggml.token_type`.
UNKNOWN_TOKEN, CONTROL_TOKEN, USER_TOKEN, BYTE_TOKEN = 2, 3, 4, 6
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LLAMA3 = _WORDS + r"\p{N}{1,3}|" + _ENDS
_QWEN2 = _WORDS + r"\p{N}|" + _ENDS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
_TEKKEN = _CASED + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Split:
    """The step before byte-level BPE. With `whole_words`, a piece that is a token becomes that
    token, whatever the merges say. With `bos`, texts begin with a token unless the file says
    otherwise."""

    patterns: tuple[str, ...]
    single_digits: bool = False
    whole_words: bool = False
    bos: bool = False
    composed: bool = False  # whether text is first normalised to Unicode NFC


# By `tokenizer.ggml.pre`. Sources: llama.cpp `src/llama-vocab.cpp` (names, `ignore_merges`,
# `add_bos`) and the `tokenizer.json` of the models named.
_SPLITS: dict[str, _Split] = {
    "smollm": _Split((_GPT2,), single_digits=True),  # HuggingFaceTB/SmolLM2-135M-Instruct
    "gpt-2": _Split((_GPT2,)),
    "llama-bpe": _Split((_LLAMA3,), whole_words=True, bos=True),  # meta-llama/Meta-Llama-3-8B
    "llama3": _Split((_LLAMA3,), whole_words=True, bos=True),
    "qwen2": _Split((_QWEN2,), composed=True),  # Qwen/Qwen2-7B, Qwen/Qwen3-8B
    "deepseek-r1-qwen": _Split((_QWEN2,), composed=True),  # DeepSeek-R1-Distill-Qwen-7B
    "tekken": _Split((_TEKKEN,), whole_words=True, bos=True),  # mistralai/Mistral-Nemo
}


_FIELD = "tokenizer.ggml."
_IDS = tuple(f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding"))
# Kinds of the fields that are used, by name without `_FIELD`.
_USED: dict[str, type] = {
    **dict.fromkeys(("model", "pre"), str),
    **dict.fromkeys(("tokens", "token_type", "scores", "merges"), list),
    **dict.fromkeys(("add_bos_token", "add_space_prefix"), bool),
    **dict.fromkeys(_IDS, int),
}
_TEMPLATE = re.compile(r"tokenizer\.chat_template(?:\.(\w+))?")
_UNUSED = re.compile(  # by any prompt, or because the fields above say it
    r"tokenizer\.(huggingface\.json|chat_templates|ggml\.token_type_count"
    r"|ggml\.(fim_...|prefix|suffix|middle|cls|mask|seperator)_token_id)"
)
_UNUSED_IF_FALSE = ("add_eos_token", "add_sep_token", "remove_extra_whitespaces")


def take_tokenizer(file: GgufFile) -> dict[str, Any]:
    """The tokenizer's fields that are used. Those that are unknown stay in the file. Raises
    ModelError for one that is missing, or sets what is not served."""
    fields: dict[str, Any] = {}
    for name in file.names("tokenizer."):
        short = name.removeprefix(_FIELD)
        if short in _USED or _TEMPLATE.fullmatch(name):
            fields[name] = file.take(name, _USED.get(short, str))
        elif _UNUSED.fullmatch(name):
            file.take(name, object)
        elif short in _UNUSED_IF_FALSE and file.take(name, bool):
            raise file.refusal(f"sets {name}, which is not served")
    needed = ["model", "tokens", "eos_token_id"]
    needed += {"llama": ["scores"], "gpt2": ["merges"]}.get(fields.get(_FIELD + "model", ""), [])
    needed += ["bos_token_id"] if _adds_bos(fields) else []
    if lacks := [_FIELD + short for short in needed if _FIELD + short not in fields]:
        raise file.refusal(f"lacks the field {lacks[0]}")
    count = len(fields[_FIELD + "tokens"])
    for short in ("token_type", "scores"):
        if len(fields.get(_FIELD + short, range(count))) != count:
            raise file.refusal(f"has {count} tokens, and another number in {_FIELD}{short}")
    for short in _IDS:
        if not 0 <= fields.get(_FIELD + short, 0) < count:
            raise file.refusal(f"has {count} tokens, and {_FIELD}{short} is none of them")
    return fields


def build_tokenizer(fields: Mapping[str, Any]) -> FastTokenizer:
    """Build the tokenizer. Raises ModelError if the file's tokenizer is of another kind."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind == "llama":
        tokenizer = _sentencepiece(fields)
    elif kind == "gpt2" and pre in _SPLITS:
        tokenizer = _byte_level(fields, _SPLITS[pre])
    else:
        raise ModelError(
            f"the GGUF file's tokenizer ({kind}, pre-tokenizer {pre}) is not supported; supported "
            f"are SentencePiece (llama) and byte-level BPE with {', '.join(sorted(_SPLITS))}; give "
            f"the model as a folder with safetensors and tokenizer.json instead"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    for token, type_ in zip(tokens, _types(fields), strict=True):
        if type_ in (CONTROL_TOKEN, USER_TOKEN):
            special = type_ == CONTROL_TOKEN
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    bos = bos_token(fields)
    if bos is not None:
        number = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, number)]
        )
    return tokenizer


def bos_token(fields: Mapping[str, Any]) -> str | None:
    """The token before every text, or None.

    The default is llama.cpp's: SentencePiece, Llama 3 and tekken add one.
    """
    number = fields.get("tokenizer.ggml.bos_token_id")
    if number is None or not _adds_bos(fields):
        return None
    return str(fields["tokenizer.ggml.tokens"][number])


def end_tokens(fields: Mapping[str, Any]) -> list[int]:
    """The ids that end an answer: of a text, a turn and a message."""
    named = (fields.get(f"{_FIELD}{end}_token_id") for end in ("eos", "eot", "eom"))
    return list(dict.fromkeys(number for number in named if number is not None))


def chat_templates(fields: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """The chat template, or all of them if there are others for special uses, such as tools."""
    found = {
        match[1] or "default": text
        for name, text in fields.items()
        if (match := _TEMPLATE.fullmatch(name))
    }
    if found.keys() <= {"default"}:
        return found.get("default")
    return [{"name": name, "template": text} for name, text in found.items()]


def _adds_bos(fields: Mapping[str, Any]) -> bool:
    split = _SPLITS.get(fields.get("tokenizer.ggml.pre", "gpt-2"))
    by_default = fields.get("tokenizer.ggml.model") == "llama" or (split is not None and split.bos)
    return bool(fields.get("tokenizer.ggml.add_bos_token", by_default))


def _types(fields: Mapping[str, Any]) -> Sequence[int]:
    return fields.get("tokenizer.ggml.token_type") or [1] * len(fields["tokenizer.ggml.tokens"])


def _byte_level(fields: Mapping[str, Any], split: _Split) -> FastTokenizer:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words)
    tokenizer = FastTokenizer(model)
    steps: list[Any] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in split.patterns]
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=True)
    )
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any]) -> FastTokenizer:
    """SentencePiece's BPE: the two neighbours whose joined piece has the best score merge first. A
    character without a piece becomes its UTF-8 bytes."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    scores: Sequence[float] = fields["tokenizer.ggml.scores"]
    types = _types(fields)
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    plain = {
        token: score
        for token, score, type_ in zip(tokens, scores, types, strict=True)
        if type_ not in (UNKNOWN_TOKEN, CONTROL_TOKEN, BYTE_TOKEN)
    }
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges(plain),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=BYTE_TOKEN in types,
    )
    tokenizer = FastTokenizer(model)
    prefixed = fields.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefixed else []
    steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, by the third's score, best first."""
    found: list[tuple[float, str, str]] = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                found.append((score, left, right))
    found.sort(key=lambda each: -each[0])
    return [(left, right) for _, left, right in found]

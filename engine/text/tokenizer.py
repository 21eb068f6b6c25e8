"""Converts text to token ids and back: the model's own tokenizer behind a narrow interface.

The api calls it on its own threads. A `Tokenizer` is immutable after construction, and several
threads may call it at once. Between calls the Rust tokenizer keeps only a cache of words. It
releases the GIL for a batch.
"""

import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import xxhash
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerBase

from engine.errors import ModelError, RequestError

# Words that a thread's tokenizer caches. Its own bound is 10,000 words of up to 255 bytes. Prompts
# of random words would fill that for good, and take 84 MB. With 1,000 words, prose of 2 kB is
# tokenized as fast (0.40 ms; 0.63 without a cache), and prose of 100 kB in 11 ms instead of 9 (AMD
# EPYC).
CACHED_WORDS = 1_000

ROLES = ("system", "developer", "user", "assistant", "tool")

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Tokenizer:
    """A fast (Rust) tokenizer with a chat template.

    `digest` is 16 bytes over the vocabulary, the rules and the template. `token_bytes(id)` joined
    over a text's ids is the text in UTF-8, which makes incremental decoding exact. No token is
    longer than `max_token_bytes`. Raises ModelError if the tokenizer is not fast or its decoder is
    of an unknown kind.
    """

    def __init__(self, base: PreTrainedTokenizerBase) -> None:
        fast = getattr(base, "backend_tokenizer", None)
        if not isinstance(fast, FastTokenizer):
            raise ModelError(
                f"{type(base).__name__} is not a fast tokenizer; the model needs a tokenizer.json"
            )
        self._base = base
        self._fast = fast
        if hasattr(fast.model, "_resize_cache"):  # BPE and unigram models; others have no cache
            fast.model._resize_cache(CACHED_WORDS)
        self.chat_template = _template_text(base)
        serialised = fast.to_str()
        identity = serialised + "\0" + (self.chat_template or "")
        self.digest = xxhash.xxh3_128_digest(identity.encode())
        self.special_token_ids = frozenset(
            number for number, token in fast.get_added_tokens_decoder().items() if token.special
        )
        self._bytes = _token_bytes(fast)
        self.max_token_bytes = max(map(len, self._bytes), default=0)
        self._as_parts = False
        if self.chat_template is not None and not self._shows_text():
            self._as_parts = True
            self._as_parts = self._shows_text()

    @property
    def vocab_size(self) -> int:
        """The number of ids this tokenizer knows. A model's embedding may be larger (padding)."""
        return len(self._bytes)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    @property
    def eos_token_id(self) -> int | None:
        eos = self._base.eos_token_id
        return eos if isinstance(eos, int) else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> "array[int]":
        """The token ids of `text`, after any token that the model's tokenizer adds first (such as a
        BOS)."""
        # A batch of one: `encode` would hold the GIL and so stop every thread, for a second per
        # megabyte. It also computes offsets, which nobody needs and which take half the time.
        [encoding] = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("i", encoding.ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are not valid UTF-8 become U+FFFD."""
        skipped: frozenset[int] = self.special_token_ids if skip_special_tokens else frozenset()
        joined = b"".join(self.token_bytes(number) for number in ids if number not in skipped)
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token. Empty for an id without a token."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation under the model's chat template.

        Raises RequestError if the template cannot render the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        conversation = [_checked(message, number) for number, message in enumerate(messages)]
        if not conversation:
            raise RequestError("messages must hold at least one message", param="messages")
        if self._as_parts:
            for message in conversation:
                message["content"] = [{"type": "text", "text": message["content"]}]
        try:
            rendered = self._base.apply_chat_template(
                conversation,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **(template_arguments or {}),
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from error
        assert isinstance(rendered, str), type(rendered)
        return rendered

    def _shows_text(self) -> bool:
        """Whether the template writes what a message says. One of a model of images may read
        content in parts only, and leave a plain text out."""
        try:
            return "words" in self.render([{"role": "user", "content": "words"}])
        except RequestError:
            return False


def _template_text(base: PreTrainedTokenizerBase) -> str | None:
    template = getattr(base, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template or None


def _checked(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message as templates expect it: a known role with text content. Raises RequestError."""
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{number}] must be an object", param=f"messages[{number}]")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"messages[{number}].role is {role!r}; it must be one of {', '.join(ROLES)}",
            param=f"messages[{number}].role",
        )
    content = message.get("content")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise RequestError(
            f"messages[{number}].content is missing", param=f"messages[{number}].content"
        )
    checked = dict(message)
    checked["role"] = "system" if role == "developer" else role
    checked["content"] = _content_text(content, number)
    return checked


def _content_text(content: object, number: int) -> str:
    param = f"messages[{number}].content"
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise RequestError(f"{param} must be a string or an array of parts", param=param)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"{param}[{index}] is of type {kind!r}; this model takes text parts only",
                param=f"{param}[{index}]",
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(
                f"{param}[{index}].text must be a string", param=f"{param}[{index}].text"
            )
        texts.append(part["text"])
    return "".join(texts)


def _token_bytes(fast: FastTokenizer) -> list[bytes]:
    """The bytes of each token id, for byte-level BPE and for SentencePiece with byte fallback."""
    steps = _decoder_steps(fast)
    added = fast.get_added_tokens_decoder()
    vocabulary = fast.get_vocab(with_added_tokens=False)
    table = [b""] * (max([*vocabulary.values(), *added], default=-1) + 1)
    if "ByteLevel" in steps:
        alphabet = _ByteAlphabet()
        for piece, number in vocabulary.items():
            table[number] = alphabet.bytes_of(piece)
    elif steps & {"ByteFallback", "Metaspace", "Replace"}:
        for piece, number in vocabulary.items():
            table[number] = _sentencepiece_bytes(piece)
    else:
        raise ModelError(
            f"the tokenizer's decoder ({', '.join(sorted(steps)) or 'none'}) is not supported: "
            f"only byte-level BPE and SentencePiece tokens can be turned into bytes one by one"
        )
    for number, token in added.items():
        table[number] = token.content.encode()
    return table


def _decoder_steps(fast: FastTokenizer) -> set[str]:
    if fast.decoder is None:
        return set()
    decoder = json.loads(fast.decoder.__getstate__())
    if decoder["type"] == "Sequence":
        return {step["type"] for step in decoder["decoders"]}
    return {decoder["type"]}


def _sentencepiece_bytes(piece: str) -> bytes:
    match = _BYTE_PIECE.match(piece)
    if match:
        return bytes([int(match.group(1), 16)])
    return piece.replace(_METASPACE, " ").encode()


class _ByteAlphabet(dict[int, int]):
    """The 256 characters that stand for bytes in byte-level BPE, to their bytes.

    Printable Latin-1 characters stand for themselves. U+0100 and on stand for the other 68 bytes,
    in order (GPT-2, `encoder.py`, `bytes_to_unicode`).
    """

    _FOREIGN = 0x100  # more than a byte

    def __init__(self) -> None:
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = (byte for byte in range(256) if byte not in printable)
        super().__init__({byte: byte for byte in printable})
        self.update({256 + offset: byte for offset, byte in enumerate(others)})

    def __missing__(self, character: int) -> int:
        return self._FOREIGN

    def bytes_of(self, piece: str) -> bytes:
        """A character of no byte is itself, in UTF-8."""
        try:
            return piece.translate(self).encode("latin-1")
        except UnicodeEncodeError:
            return b"".join(
                bytes([self[ord(each)]]) if ord(each) in self else each.encode() for each in piece
            )

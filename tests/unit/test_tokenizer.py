"""Text to ids and back, chat templates, and tokenizers rebuilt from GGUF fields."""

import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from engine.errors import ModelError, RequestError
from engine.models.gguf import build_tokenizer
from engine.testing.models import EOS, IM_START, bytes_tokenizer
from engine.text.tokenizer import Tokenizer

TOKENIZER = bytes_tokenizer()
TEXTS = ["", "hello world", "a\tb\n\n  c", "12345 x 2024", "日本語。", "🙂👩‍👩‍👧", "  don't"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert b"".join(TOKENIZER.token_bytes(token) for token in ids) == text.encode()


def test_ids_without_a_token_are_empty() -> None:
    assert TOKENIZER.token_bytes(-1) == TOKENIZER.token_bytes(10**6) == b""


def test_chat_renders_roles_and_asks_for_an_answer() -> None:
    ids = TOKENIZER.chat([{"role": "user", "content": "hi"}])
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == IM_START
    assert EOS in ids


def test_text_parts_are_joined_and_developer_is_system() -> None:
    message = {
        "role": "developer",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    assert TOKENIZER.render([message], add_generation_prompt=False) == (
        "<|im_start|>system\nab<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "at least one"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role", "wizard"),
        ([{"content": "x"}], "messages[0].role", "must be one of"),
        ([{"role": "user"}], "messages[0].content", "missing"),
        ([{"role": "user", "content": 5}], "messages[0].content", "string or an array"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0]",
            "image_url",
        ),
        (["hello"], "messages[0]", "object"),
    ],
)
def test_messages_that_no_template_can_render(messages: Any, param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        TOKENIZER.chat(messages)
    assert caught.value.param == param


def test_a_template_that_refuses_is_a_request_error() -> None:
    base = _base("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        Tokenizer(base).chat([{"role": "user", "content": "x"}])


def test_without_a_template_chat_is_refused() -> None:
    tokenizer = Tokenizer(_base(None))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "x"}])


def test_the_digest_covers_the_template() -> None:
    assert Tokenizer(_base("a")).digest == Tokenizer(_base("a")).digest
    assert Tokenizer(_base("a")).digest != Tokenizer(_base("b")).digest


def test_a_decoder_of_an_unknown_kind_is_refused() -> None:
    fast = FastTokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))


def test_sentencepiece_tokens_with_byte_fallback() -> None:
    vocabulary = {"<unk>": 0, "<0xE6>": 1, "▁a": 2, "b": 3}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))
    assert [tokenizer.token_bytes(token) for token in (1, 2, 3)] == [b"\xe6", b" a", b"b"]


def _base(template: str | None) -> PreTrainedTokenizerFast:
    fast = FastTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    fast.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=fast, chat_template=template)


# GGUF


def gguf_fields(pre: str = "smollm") -> dict[str, Any]:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "a", "b", "ab", "Ġ", "Ġa"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 7],
        "tokenizer.ggml.merges": ["a b", "Ġ a", "1 2"][:2],
    }


def test_gguf_digits_are_split_and_nothing_is_prepended() -> None:
    tokenizer = build_tokenizer(gguf_fields())
    assert tokenizer.encode("ab a12").ids == [7, 9, 3, 4]


def test_gguf_control_tokens_are_special() -> None:
    tokenizer = build_tokenizer(gguf_fields())
    assert tokenizer.encode("<|im_start|>ab<|im_end|>").ids == [1, 7, 2]
    assert {2} <= {n for n, t in tokenizer.get_added_tokens_decoder().items() if t.special}


def test_gguf_tokenizer_of_another_kind_is_refused_with_its_name() -> None:
    with pytest.raises(ModelError, match="pre-tokenizer tekken"):
        build_tokenizer(gguf_fields("tekken"))


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """Holding the interpreter's lock, they stood still for nearly all of it."""
    seen, done = [time.monotonic()], threading.Event()

    def look() -> None:
        while not done.wait(0.001):
            seen.append(time.monotonic())

    other = threading.Thread(target=look)
    other.start()
    began = time.monotonic()
    TOKENIZER.encode("a stranger's long text, " * 40_000)
    took = time.monotonic() - began
    done.set()
    other.join()
    seen.append(time.monotonic())
    assert max(after - before for before, after in pairwise(seen)) < 0.7 * took

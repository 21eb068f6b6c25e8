"""Text to ids and back, chat templates, tokenizers rebuilt from GGUF fields, and incremental text:
the pieces sent are the whole text, safe at every moment."""

import ctypes
import random
import string
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.errors import ModelError, RequestError
from engine.models.gguf import _save_tokenizer
from engine.models.gguf_tokenizer import build_tokenizer
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer, _ByteAlphabet
from tests.support.models import EOS, IM_START, bytes_tokenizer

TOKENIZER = bytes_tokenizer()
TEXTS = ["", "hello world", "a\tb\n\n  c", "12345 x 2024", "日本語。", "🙂👩‍👩‍👧", "  don't"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert b"".join(TOKENIZER.token_bytes(token) for token in ids) == text.encode()


def test_ids_without_a_token_are_empty():
    assert TOKENIZER.token_bytes(-1) == TOKENIZER.token_bytes(10**6) == b""


def test_chat_renders_roles_and_asks_for_an_answer():
    rendered = TOKENIZER.render([{"role": "user", "content": "hi"}])
    ids = TOKENIZER.encode(rendered, add_special_tokens=False)
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == IM_START
    assert EOS in ids


def test_text_parts_are_joined_and_developer_is_system():
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
def test_messages_that_no_template_can_render(messages, param, words):
    with pytest.raises(RequestError, match=words) as caught:
        TOKENIZER.render(messages)
    assert caught.value.param == param


def test_a_template_that_refuses_is_a_request_error():
    base = _base("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        Tokenizer(base).render([{"role": "user", "content": "x"}])


def test_a_template_that_reads_parts_alone_is_given_parts():
    """As that of a model of images, which would leave a plain text out."""
    template = (
        "{% for message in messages %}{{ message['role'] }}:{% for part in message['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %};{% endfor %}"
    )
    asked = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert "user:hi;assistant:;user:ab;" == Tokenizer(_base(template)).render(asked)


def test_without_a_template_chat_is_refused():
    tokenizer = Tokenizer(_base(None))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render([{"role": "user", "content": "x"}])


def test_the_digest_covers_the_template():
    assert Tokenizer(_base("a")).digest == Tokenizer(_base("a")).digest
    assert Tokenizer(_base("a")).digest != Tokenizer(_base("b")).digest


def test_a_decoder_of_an_unknown_kind_is_refused():
    fast = FastTokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))


def test_sentencepiece_tokens_with_byte_fallback():
    vocabulary = {"<unk>": 0, "<0xE6>": 1, "▁a": 2, "b": 3}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))
    assert [tokenizer.token_bytes(token) for token in (1, 2, 3)] == [b"\xe6", b" a", b"b"]


def test_byte_level_tokens_are_bytes_and_foreign_characters_are_themselves():
    pieces = {"a": b"a", "Ġa": b" a", "æĹ¥": "日".encode(), "Ń": b"\xad", "ł": b"\xa0"}
    foreign = {"日Ġ": "日 ".encode(), "\xada": "\xada".encode(), " ¡": b" \xa1"}
    expected = pieces | foreign
    vocabulary = {piece: number for number, piece in enumerate(expected)}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))
    assert [tokenizer.token_bytes(number) for number in range(8)] == list(expected.values())
    for byte, piece in enumerate(_byte_pieces()):
        assert _ByteAlphabet().bytes_of(piece) == bytes([byte])


def _byte_pieces() -> list[str]:
    """What the tokenizer's own library makes of each byte."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own = [chr(byte) for byte in range(256) if chr(byte) in alphabet]
    others = iter(sorted(set(alphabet) - set(own)))
    return [chr(byte) if chr(byte) in own else next(others) for byte in range(256)]


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


def test_gguf_digits_are_split_and_nothing_is_prepended():
    tokenizer = build_tokenizer(gguf_fields())
    assert tokenizer.encode("ab a12").ids == [7, 9, 3, 4]


def test_gguf_control_tokens_are_special():
    tokenizer = build_tokenizer(gguf_fields())
    assert tokenizer.encode("<|im_start|>ab<|im_end|>").ids == [1, 7, 2]
    assert {2} <= {n for n, t in tokenizer.get_added_tokens_decoder().items() if t.special}


def test_gguf_tokenizer_of_another_kind_is_refused_with_its_name():
    with pytest.raises(ModelError, match=r"pre-tokenizer superbpe.*deepseek-r1-qwen.*tekken"):
        build_tokenizer(gguf_fields("superbpe"))


TEXT = "I'll say: DON'T 12345 été  naïve/日本語\n\n  x"


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("llama-bpe", "123|45"),
        *((pre, "1|2|3|4|5") for pre in ("qwen2", "deepseek-r1-qwen", "tekken")),
    ],
)
def test_text_is_split_as_the_named_pre_tokenizer_splits_it(pre, digits):
    expected = f"I|'ll| say|:| DON|'T| |{digits}| été| | naïve|/日本語|\n\n| | x"
    step = build_tokenizer(gguf_fields(pre)).pre_tokenizer
    bounds = [bounds for _, bounds in step.pre_tokenize_str(TEXT)]
    assert expected.split("|") == [TEXT[start:end] for start, end in bounds]


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", [6]), ("gpt-2", [4, 5])])
def test_a_word_that_is_a_token_is_that_token_where_merges_are_ignored(pre, expected):
    fields = gguf_fields(pre)
    fields["tokenizer.ggml.tokens"] = ["<s>", "x", "y", "z", "a", "b", "ab", "Ġ", "Ġa", "c"]
    fields["tokenizer.ggml.merges"] = ["Ġ a"]
    assert expected == build_tokenizer(fields).encode("ab").ids


def sentencepiece_fields(**given: Any) -> dict[str, Any]:
    """Control tokens, bytes, letters, and longer pieces with scores in no particular order."""
    letters = ["▁", *"abcdef"]
    pieces = ["ab", "▁a", "bc", "▁ab", "abc", "de", "def", "▁d", "cd", "▁▁", "fa", "bcd"]
    scores = [-3.0, -9.0, -1.0, -4.0, -2.0, -8.0, -5.0, -7.0, -6.0, -10.0, -12.0, -11.0]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *letters, *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-100.0] * len(letters) + scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(letters) + len(pieces)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **given,
    }


def merged_by_score(fields: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's rule, told plainly: join the best pair until none can be joined."""
    number = {token: n for n, token in enumerate(fields["tokenizer.ggml.tokens"])}
    score = fields["tokenizer.ggml.scores"]
    parts = list("▁" + text.replace(" ", "▁"))
    while joined := [
        (-score[number[a + b]], at)
        for at, (a, b) in enumerate(pairwise(parts))
        if a + b in number and a in number and b in number
    ]:
        at = min(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [number[part]] if part in number else [3 + byte for byte in part.encode()]
    return ids


def test_sentencepiece_of_a_gguf_merges_by_score_and_falls_back_to_bytes():
    fields = sentencepiece_fields()
    tokenizer = build_tokenizer(fields)
    source = random.Random(0)
    for _ in range(300):
        text = "".join(source.choice("abcdef é日") for _ in range(source.randrange(1, 20)))
        assert [1, *merged_by_score(fields, text)] == tokenizer.encode(text).ids
        assert text == tokenizer.decode(tokenizer.encode(text).ids)


@pytest.mark.parametrize(
    ("pre", "said", "expected"),
    [
        ("llama-bpe", None, [1, 7]),
        ("tekken", None, [1, 7]),
        ("llama-bpe", False, [7]),
        ("qwen2", None, [7]),
        ("qwen2", True, [1, 7]),
    ],
)
def test_texts_begin_as_the_file_says_or_as_its_kind_does(pre, said, expected):
    fields = gguf_fields(pre) | {"tokenizer.ggml.bos_token_id": 1}
    if said is not None:
        fields["tokenizer.ggml.add_bos_token"] = said
    assert expected == build_tokenizer(fields).encode("ab").ids


def test_what_a_sentencepiece_file_says_of_its_beginning_is_done():
    bare = sentencepiece_fields(
        **{"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}
    )
    number = bare["tokenizer.ggml.tokens"].index
    assert [number("abc")] == build_tokenizer(bare).encode("abc").ids
    chat = build_tokenizer(sentencepiece_fields()).encode("<s>ab</s>", add_special_tokens=False)
    assert [1, number("▁ab"), 2] == chat.ids


def test_a_sentencepiece_tokenizer_comes_back_from_its_folder_with_one_beginning(tmp_path):
    fields = sentencepiece_fields()
    _save_tokenizer(build_tokenizer(fields), fields, 512, tmp_path)
    loaded = Tokenizer(AutoTokenizer.from_pretrained(tmp_path))
    expected = [1, *merged_by_score(fields, "abc déf")]
    assert expected == list(loaded.encode("abc déf"))
    assert expected[1:] == list(loaded.encode("abc déf", add_special_tokens=False))
    assert 2 == loaded.eos_token_id
    assert " abc déf" == loaded.decode(expected)


def test_of_words_that_are_none_few_are_remembered():
    """Each of 255 letters took 8 kB of the thread that cut it, and 10,000 stayed for good."""

    class Allocated(ctypes.Structure):  # <malloc.h>
        _fields_ = [("counts", ctypes.c_size_t * 10)]

    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("this C library does not tell what is allocated")
    libc.mallinfo2.restype = Allocated
    chance = random.Random(0)
    tokenizer = bytes_tokenizer()

    def allocated_bytes() -> int:
        return int(libc.mallinfo2().counts[7])  # uordblks

    before = allocated_bytes()
    for _ in range(4_000):
        tokenizer.encode("".join(chance.choices(string.ascii_lowercase, k=250)))
    assert 16_000_000 > allocated_bytes() - before


def feed_all(detokenizer: IncrementalDetokenizer, text: str) -> list[str]:
    return [detokenizer.feed([byte]) for byte in text.encode()] + [detokenizer.flush()]


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_pieces_join_to_the_text_and_never_hold_half_a_character(text):
    pieces = feed_all(IncrementalDetokenizer(TOKENIZER), text)
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces).replace(text, "")


@given(st.text("ab c", max_size=30), st.lists(st.text("ab c", min_size=1, max_size=4), max_size=3))
@settings(max_examples=200, deadline=None)
def test_text_ends_before_the_stop_string_that_is_complete_first(text, stop):
    detokenizer = IncrementalDetokenizer(TOKENIZER, stop)
    sent = "".join(feed_all(detokenizer, text))
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert detokenizer.stopped == bool(ends)
    assert sent == (text[: min(ends)[1]] if ends else text)
    assert detokenizer.num_tokens == (min(ends)[0] if ends else len(text))


def test_a_stop_string_may_end_inside_one_feed_and_the_rest_is_dropped():
    detokenizer = IncrementalDetokenizer(TOKENIZER, ["END"])
    assert detokenizer.feed(b"one END two") == "one "
    assert detokenizer.stopped
    assert detokenizer.stop_string == "END"
    assert detokenizer.num_tokens == len(b"one END")
    assert detokenizer.feed(b"more") == ""
    assert detokenizer.flush() == ""


def test_broken_utf8_becomes_replacement_characters_at_the_latest_on_flush():
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert detokenizer.feed([0xE6, 0x97]) == ""
    assert detokenizer.feed([0x41]) == "\N{REPLACEMENT CHARACTER}A"
    assert detokenizer.feed([0xE6]) == ""
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(("shown", "expected"), [((), "ab"), (("<|im_end|>",), "a<|im_end|>b")])
def test_special_tokens_are_shown_only_when_asked_for(shown, expected):
    detokenizer = IncrementalDetokenizer(TOKENIZER, shown=shown)
    assert detokenizer.feed([ord("a"), EOS, ord("b")]) == expected

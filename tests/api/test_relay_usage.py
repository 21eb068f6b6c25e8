"""What engines elsewhere say of tokens, each shape as it is published or as it was recorded.

`REQUEST` is one request, told in every shape: it must cost the same whoever tells it, as a whole
answer and as a stream.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from api.relay.usage import NOTHING, Counted, UsageReader, billed
from billing.prices.cards import default_card
from billing.prices.rating import rate
from billing.usage import Usage
from tiers.tier import TierName

Said = dict[str, Any]


def usage(prompt: Any, output: int, **more: Any) -> Said:
    """In OpenAI's chat."""
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return {"usage": {**counts, "total_tokens": prompt + output, **more}}


def details(**more: Any) -> Said:
    return {"prompt_tokens_details": more}


def response(prompt: int, output: int, **more: Any) -> Said:
    """In OpenAI's Responses; `more` are details of the input."""
    counts = {"input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output}
    return {"usage": {**counts, "input_tokens_details": more}}


def message(rest: int | None, output: int, read: int | None, wrote: Any = 0, **more: Any) -> Said:
    """In Anthropic's Messages, of which the input is the rest of the prompt."""
    counts = {"input_tokens": rest, "cache_read_input_tokens": read, "output_tokens": output}
    return {"usage": {**counts, "cache_creation_input_tokens": wrote, **more}}


def call(kind: str, *counts: int) -> Said:
    """One of several in an answer of Anthropic's."""
    return {"type": kind, **message(*counts[:2], *(counts[2:] or (0, 0)))["usage"]}


def timings(cached: int, computed: int, output: int, **more: Any) -> Said:
    """Beside the usage, in llama.cpp's."""
    return {"timings": {"cache_n": cached, "prompt_n": computed, "predicted_n": output, **more}}


def kept(minutes: int, hour: int) -> Said:
    split = {"ephemeral_5m_input_tokens": minutes, "ephemeral_1h_input_tokens": hour}
    return {"cache_creation": split}


# A prompt of 1,000 tokens, of which 640 were cached and 300 were written; 50 of output.
WRITE = {"cached_tokens": 640, "cache_write_tokens": 300}
READ = details(cached_tokens=640)
THOUGHT = {"completion_tokens_details": {"reasoning_tokens": 20}}
OF_LITELLM = {"cache_read_input_tokens": 640, "cache_creation_input_tokens": 300}
WRITES: Mapping[str, Said] = {
    "OpenAI chat": usage(1000, 50, **details(**WRITE)),
    "OpenAI chat that thinks": usage(1000, 50, **details(**WRITE), **THOUGHT),
    "OpenAI Responses": {
        "usage": response(1000, 50, **WRITE)["usage"]
        | {"output_tokens_details": {"reasoning_tokens": 0}}
    },
    "OpenRouter": usage(1000, 50, **details(**WRITE, audio_tokens=0), cost=0.00123, is_byok=False),
    "Anthropic": message(60, 50, 640, 300, **kept(300, 0), service_tier="standard"),
    "Anthropic that summed up before": message(
        50, 40, 600, 280, iterations=[call("message", 50, 40), call("compaction", 10, 10, 40, 20)]
    ),
    "Anthropic's summary": message(0, 0, 0, 0, iterations=[call("compaction", 60, 50, 640, 300)]),
    "LiteLLM before Anthropic": usage(
        1000, 50, **details(cached_tokens=640, text_tokens=None), **OF_LITELLM
    ),
    "LiteLLM": usage(1000, 50, **details(cached_tokens=640, cache_creation_tokens=300)),
    "Qwen": usage(1000, 50, **details(cached_tokens=640, cache_creation_input_tokens=300)),
    "vLLM": usage(1000, 50, **details(cached_tokens=640, created_cache_tokens=300)),
}
# The same without writes.
OF_DEEPSEEK = {"prompt_cache_hit_tokens": 640, "prompt_cache_miss_tokens": 360}
OF_MISTRAL = {"num_cached_tokens": 640, "prompt_audio_seconds": None}
OF_VLLM = details(cached_tokens=640, created_cache_tokens=None, multimodal_tokens=None)
READS: Mapping[str, Said] = {
    "DeepSeek": usage(1000, 50, **OF_DEEPSEEK),
    "DeepSeek beside OpenAI's field": usage(1000, 50, **READ, **OF_DEEPSEEK),
    "Moonshot": usage(1000, 50, cached_tokens=640),
    "Mistral": usage(1000, 50, **READ, **OF_MISTRAL),
    "vLLM": usage(1000, 50, **OF_VLLM, completion_tokens_details=None),
    "SGLang": usage(1000, 50, **READ, reasoning_tokens=0),
    "Gemini's compatible one, with its thoughts beside": {
        "usage": usage(1000, 30, **READ, **THOUGHT)["usage"] | {"total_tokens": 1050}
    },
    "llama-server": usage(1000, 50, **READ) | timings(640, 360, 50, prompt_ms=30.9),
    "llama-server's timings beside a bare usage": usage(1000, 50) | timings(640, 360, 50),
    "llama-server's timings alone": timings(640, 360, 50)
    | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    "Anthropic": message(360, 50, 640),
}
IN_STREAMS: Mapping[str, list[Said]] = {
    "OpenAI's last chunk, after null": [
        {"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": None},
        {"choices": [], **READS["vLLM"]},
    ],
    "the same usage twice": [READS["vLLM"], READS["vLLM"]],
    "vLLM's continuous_usage_stats": [
        *({"choices": [{}], **usage(1000, output)} for output in (0, 20)),
        {"choices": [], **READS["vLLM"]},
    ],
    "zeros until the end": [usage(0, 0, cached_tokens=0), READS["vLLM"]],
    "Groq, beside the choices": [{"choices": [], "x_groq": READS["vLLM"]}],
    "Moonshot, in the choice": [{"choices": [{"index": 0, "delta": {}, **READS["Moonshot"]}]}],
    "Responses": [
        {"type": "response.created", "response": {"usage": None}},
        {"type": "response.completed", "response": response(1000, 50, cached_tokens=640)},
    ],
}
SUMMARY = call("compaction", 60, 10, 40, 0)
BEGUN: Said = {"type": "message_start", "message": READS["Anthropic"] | {"role": "assistant"}}
MESSAGES: Mapping[str, list[Said]] = {
    "the prompt at the start, the output at the end": [
        BEGUN,
        {"type": "message_delta", "usage": {"output_tokens": 50}},
    ],
    "the prompt again at the end, which is not added": [
        BEGUN,
        {"type": "message_delta", **READS["Anthropic"]},
    ],
    "another prompt at the end, which counts": [
        {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}},
        {"type": "message_delta", **READS["Anthropic"]},
    ],
    "a summary before, told at the end": [
        {"type": "message_start", "message": {**message(300, 1, 600, 0), "role": "assistant"}},
        {"type": "message_delta", **message(300, 40, 600, iterations=[SUMMARY])},
    ],
    "null at the end, which says nothing": [
        BEGUN,
        {"type": "message_delta", **message(None, 50, None, None)},
    ],
}
WHOLE = usage(1000, 50, cached_tokens=640)
# What tells no more than the prompt and the output, and what tells nothing.
UNKNOWN_HITS: Mapping[str, Said] = {
    "no details": usage(1000, 50),
    "details of null": usage(1000, 50, prompt_tokens_details=None),
    "cached null": usage(1000, 50, **details(cached_tokens=None)),
    **{repr(n): usage(1000, 50, cached_tokens=n) for n in (1001, -1, "640", 640.0, True)},
    "two hits that differ": usage(1000, 50, **READ, cached_tokens=512),
    "DeepSeek's two that do not make the prompt": usage(
        1000, 50, **OF_DEEPSEEK | {"prompt_cache_miss_tokens": 361}
    ),
    "more writes than misses": usage(1000, 50, **details(**WRITE | {"cache_write_tokens": 361})),
}
UNKNOWN: Mapping[str, list[Said]] = {
    "nothing": [],
    "an empty usage": [{"usage": {}}],
    **{f"a prompt of {n!r}": [usage(n, 50)] for n in (-1, True, 12.0)},
    "no prompt": [{"usage": {"completion_tokens": 50}}],
    "a negative output": [usage(1000, -1)],
    "two prompts in one stream": [WHOLE, usage(900, 50, cached_tokens=640)],
    "two hits in one stream": [WHOLE, usage(1000, 50, cached_tokens=0)],
    "zeros at the end": [WHOLE, usage(0, 0)],
    "an output that shrinks": [WHOLE, usage(1000, 49, cached_tokens=640)],
    "a third that agrees with the first": [usage(n, 50) for n in (1000, 900, 1000)],
}
CANNOT_BE: Mapping[str, tuple[list[Said], Counted]] = {
    **{case: ([said], Counted(1000, output=50)) for case, said in UNKNOWN_HITS.items()},
    **{case: (said, NOTHING) for case, said in UNKNOWN.items()},
    "Anthropic's negative read": (
        [{"usage": {"input_tokens": 5, "cache_read_input_tokens": -1, "output_tokens": 3}}],
        Counted(output=3),
    ),
    "Anthropic's summary without its prompt": (
        [message(5, 3, 0, 0, iterations=[{"type": "compaction", "output_tokens": 4}])],
        NOTHING,
    ),
    "Anthropic's hour above its writes": (
        [message(5, 3, 0, 7, cache_creation={"ephemeral_1h_input_tokens": 8})],
        Counted(output=3),
    ),
}


def read(*said: Said, is_partial: bool = False) -> Counted:
    reader = UsageReader(is_partial)
    for one in said:
        reader.read(one)
    return reader.counted


def bill(seen: Counted, most: int = 4000) -> Usage:
    return billed(seen, most_prompt=most, sent=3, most_output=100, is_whole=True)


@pytest.mark.parametrize("shape", WRITES)
def test_a_request_that_wrote_costs_the_same_in_every_shape(shape):
    expected = Usage(hit_device=640, miss=360, cache_write=300, output=50)
    assert expected == bill(read(WRITES[shape]))


@pytest.mark.parametrize("shape", READS)
def test_a_request_that_hit_costs_the_same_in_every_shape(shape):
    expected = Usage(hit_device=640, miss=360, output=50)
    assert expected == bill(read(READS[shape]))
    pinned = default_card().at("any", default_card().valid_from_ns)
    hit, miss, output = (pinned.rates.of(name) for name in ("hit_device", "miss", "output"))
    assert 640 * hit + 360 * miss + 50 * output == rate(bill(read(READS[shape])), pinned).amount


@pytest.mark.parametrize("case", [*IN_STREAMS, *MESSAGES])
def test_a_stream_costs_what_the_whole_answer_does(case):
    seen = read(*(IN_STREAMS | MESSAGES)[case], is_partial=case in MESSAGES)
    assert Usage(hit_device=640, miss=360, output=50) == bill(seen)


@pytest.mark.parametrize("case", CANNOT_BE)
def test_counts_that_cannot_be_are_not_guessed(case):
    said, expected = CANNOT_BE[case]
    seen = read(*said)
    assert expected == seen
    usage = bill(seen)
    assert 0 < usage.unreported == usage.miss
    assert (3 if seen.output is None else seen.output) == usage.output, "what was sent at least"
    assert (0, seen.prompt or 4000) == (usage.hit, usage.miss), "a miss of what it could be at most"


# vLLM 0.32 (CPU) with --enable-prompt-tokens-details, asked through a relay: the same prompt of 331
# tokens, the first time and later. LiteLLM's proxy 1.106.2, asked so before a stand-in and before a
# server of ours.
COLD = Usage(miss=331, cache_write=256, output=4)
HIT = Usage(hit_device=256, miss=75, output=4)
VLLM_NEW = details(cached_tokens=0, created_cache_tokens=256, multimodal_tokens=None)
VLLM_MESSAGE = message(75, 4, 256)
OF_TURNS: Said = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
OUT_OF_TURNS: Said = {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
VLLM_RESPONSE = response(331, 4, cached_tokens=256, cache_write_tokens=0, **OF_TURNS)
VLLM_RESPONSE["usage"]["output_tokens_details"] = OUT_OF_TURNS | dict.fromkeys(
    ("reasoning_tokens", "tool_output_tokens"), 0
)
LITELLM_KINDS = dict.fromkeys(("audio_tokens", "text_tokens", "image_tokens", "video_tokens"))
LITELLM_TIERS = dict.fromkeys(("text_tokens", "audio_tokens", "image_tokens"))
LITELLM_OUT = {"reasoning_tokens": 0, "text_tokens": 4}
LITELLM_CHUNK = usage(331, 4, **details(cached_tokens=256), completion_tokens_details=LITELLM_OUT)
LITELLM_RESPONSE = response(
    331,
    4,
    **LITELLM_KINDS | {"cached_tokens": 256, "cache_write_tokens": 0},
    cached_tokens_details=LITELLM_TIERS,
)
LITELLM_RESPONSE["usage"] |= {
    "output_tokens_details": {"audio_tokens": None, "reasoning_tokens": 0, "text_tokens": None},
    "cost": None,
}
LITELLM_DELTA = {"input_tokens": 75, "output_tokens": 4, "cache_read_input_tokens": 256}
# llama.cpp's server (xllamacpp 2026.10.11549) on a tiny GGUF file, asked again through a relay: a
# prompt of 308 tokens.
LLAMA_HIT = Usage(hit_device=307, miss=1, output=4)
LLAMA_TIMES = timings(307, 1, 4, prompt_ms=0.449)
LLAMA_CHAT = usage(308, 4, **details(cached_tokens=307)) | LLAMA_TIMES
LLAMA_RESPONSE = response(308, 4, cached_tokens=307)
LLAMA_START = {"cache_read_input_tokens": 307, "input_tokens": 1, "output_tokens": 0}
LLAMA_PROGRESS = {"total": 308, "cache": 307, "processed": 307, "time_ms": 0}


def choice(finish: str | None = None, **more: Any) -> Said:
    return {"choices": [{"finish_reason": finish, "index": 0, **more}]}


# What was said, whether in Messages, and what it costs.
RECORDED: Mapping[str, tuple[list[Said], bool, Usage]] = {
    "vLLM's chat, cold": ([usage(331, 4, **VLLM_NEW, completion_tokens_details=None)], False, COLD),
    "vLLM's Responses": ([VLLM_RESPONSE], False, HIT),
    "vLLM's Messages, streamed: its start counts all as input": (
        [
            {"message": {"usage": {"input_tokens": 331, "output_tokens": 0}}},
            {"type": "message_delta", **VLLM_MESSAGE},
        ],
        True, HIT,
    ),
    "LiteLLM's chat, streamed, beside an empty choice": (
        [{"choices": [{"index": 0, "delta": {}}], **LITELLM_CHUNK}], False, HIT,
    ),
    "LiteLLM's Responses": ([LITELLM_RESPONSE], False, HIT),
    "LiteLLM's Messages, streamed": (
        [{"type": "message_delta", "usage": LITELLM_DELTA}], True, HIT,
    ),
    "llama.cpp's chat, streamed with timings_per_token and return_progress": (
        [
            choice(delta={"content": None})
            | timings(307, 0, 0, prompt_ms=0.0)
            | {"prompt_progress": LLAMA_PROGRESS},
            choice(delta={"content": "a"}) | timings(307, 1, 1, prompt_ms=0.449),
            choice("length", delta={}),
            {"choices": [], **LLAMA_CHAT},
        ],
        False, LLAMA_HIT,
    ),
    "llama.cpp's Messages, streamed: the prompt at the start alone": (
        [
            {"type": "message_start", "message": {"usage": LLAMA_START}},
            {"type": "message_delta", "usage": {"output_tokens": 4}},
        ],
        True, LLAMA_HIT,
    ),
    "llama.cpp's Responses, streamed, with timings beside": (
        [
            {"type": "response.created", "response": {"status": "in_progress"}},
            {"type": "response.completed", "response": LLAMA_RESPONSE, **LLAMA_TIMES},
        ],
        False, LLAMA_HIT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDED.values(), ids=RECORDED)
def test_a_real_endpoint_is_billed_as_it_counts(case):
    said, is_partial, expected = case
    assert expected == bill(read(*said, is_partial=is_partial))


def test_messages_never_count_reads_as_part_of_their_input():
    """Also where no read is told: Anthropic's `input_tokens` is the rest of the prompt."""
    seen = read({"usage": {"input_tokens": 7, "output_tokens": 2}}, is_partial=True)
    assert Counted(7, None, 0, 0, 2) == seen


OF_AN_HOUR = {
    "Anthropic": message(5, 1, 0, 30, **kept(10, 20)),
    "LiteLLM": usage(
        *(35, 1),
        **details(cached_tokens=0, cache_creation_token_details=kept(10, 20)["cache_creation"]),
        cache_creation_input_tokens=30,
    ),
    "Qwen": usage(
        35, 1, **details(cached_tokens=0, cache_creation_input_tokens=30, **kept(10, 20))
    ),
}


@pytest.mark.parametrize("shape", OF_AN_HOUR)
def test_an_hour_of_keeping_is_told_apart(shape):
    seen = read(OF_AN_HOUR[shape], is_partial=shape == "Anthropic")
    assert Usage(miss=35, cache_write=10, cache_write_1h=20, output=1) == bill(seen)


def test_a_server_of_ours_tells_its_hits_by_tier():
    tiers = {"device": 100, "host": 200, "disk": 40, "remote": 300}
    told = details(cached_tokens=640, cached_tokens_details=tiers)
    expected = {TierName(name): tokens for name, tokens in tiers.items()}
    assert expected == read(usage(1000, 50, **told)).hits
    tiers["disk"] = 41  # they no longer make the hits
    assert {TierName.DEVICE: 640} == read(usage(1000, 50, **told)).hits


@pytest.mark.parametrize("prompt", [0, 4001])
def test_a_prompt_that_the_body_cannot_have_is_unreported(prompt):
    assert Usage(miss=4000, unreported=4000, output=50) == bill(
        read(usage(prompt, 50, cached_tokens=0))
    )


def test_no_more_output_is_billed_than_is_held():
    assert 100 == bill(read(usage(1000, 101, cached_tokens=0))).output


def test_what_is_no_answer_says_nothing():
    for document in ({"usage": 5}, {"choices": "x"}, {"usage": [1]}, {"message": None}):
        assert NOTHING == read(document)

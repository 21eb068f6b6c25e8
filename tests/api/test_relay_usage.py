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


def usage(prompt: int, output: int, **more: Any) -> Said:
    """In OpenAI's chat."""
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return {"usage": {**counts, "total_tokens": prompt + output, **more}}


def details(**more: Any) -> Said:
    return {"prompt_tokens_details": more}


# A prompt of 1,000 tokens, of which 640 were cached and 300 were written; 50 of output.
WRITES: Mapping[str, Said] = {
    "OpenAI chat": usage(1000, 50, **details(cached_tokens=640, cache_write_tokens=300)),
    "OpenAI chat that thinks": usage(
        1000,
        50,
        **details(cached_tokens=640, cache_write_tokens=300),
        completion_tokens_details={"reasoning_tokens": 20},
    ),
    "OpenAI Responses": {
        "usage": {
            "input_tokens": 1000,
            "input_tokens_details": {"cached_tokens": 640, "cache_write_tokens": 300},
            "output_tokens": 50,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 1050,
        }
    },
    "OpenRouter": usage(
        1000,
        50,
        **details(cached_tokens=640, cache_write_tokens=300, audio_tokens=0),
        cost=0.00123,
        is_byok=False,
    ),
    "Anthropic": {
        "usage": {
            "input_tokens": 60,
            "cache_read_input_tokens": 640,
            "cache_creation_input_tokens": 300,
            "cache_creation": {"ephemeral_5m_input_tokens": 300, "ephemeral_1h_input_tokens": 0},
            "output_tokens": 50,
            "service_tier": "standard",
        }
    },
    "LiteLLM before Anthropic": usage(
        1000,
        50,
        **details(cached_tokens=640, text_tokens=None),
        cache_read_input_tokens=640,
        cache_creation_input_tokens=300,
    ),
    "vLLM with created_cache_tokens": usage(
        1000, 50, **details(cached_tokens=640, created_cache_tokens=300)
    ),
}
# The same without writes.
READS: Mapping[str, Said] = {
    "DeepSeek": usage(1000, 50, prompt_cache_hit_tokens=640, prompt_cache_miss_tokens=360),
    "DeepSeek beside OpenAI's field": usage(
        1000,
        50,
        **details(cached_tokens=640),
        prompt_cache_hit_tokens=640,
        prompt_cache_miss_tokens=360,
    ),
    "Moonshot": usage(1000, 50, cached_tokens=640),
    "Mistral": usage(
        1000, 50, **details(cached_tokens=640), num_cached_tokens=640, prompt_audio_seconds=None
    ),
    "vLLM": usage(
        1000,
        50,
        **details(cached_tokens=640, created_cache_tokens=None, multimodal_tokens=None),
        completion_tokens_details=None,
    ),
    "SGLang": usage(1000, 50, **details(cached_tokens=640), reasoning_tokens=0),
    "Gemini's compatible one, with its thoughts beside": usage(
        1000,
        30,
        **details(cached_tokens=640) | {"completion_tokens_details": {"reasoning_tokens": 20}},
    ),
    "llama-server": usage(1000, 50, **details(cached_tokens=640))
    | {"timings": {"cache_n": 640, "prompt_n": 360, "predicted_n": 50, "prompt_ms": 30.9}},
    "llama-server's timings beside a bare usage": usage(1000, 50)
    | {"timings": {"cache_n": 640, "prompt_n": 360, "predicted_n": 50}},
    "llama-server's timings alone": {
        "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        "timings": {"cache_n": 640, "prompt_n": 360, "predicted_n": 50},
    },
    "Anthropic": {
        "usage": {
            "input_tokens": 360,
            "cache_read_input_tokens": 640,
            "cache_creation_input_tokens": 0,
            "output_tokens": 50,
        }
    },
}
READS["Gemini's compatible one, with its thoughts beside"]["usage"]["total_tokens"] = 1050
IN_STREAMS: Mapping[str, list[Said]] = {
    "OpenAI's last chunk, after null": [
        {"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": None},
        {"choices": [], **READS["vLLM"]},
    ],
    "the same usage twice": [READS["vLLM"], READS["vLLM"]],
    "vLLM's continuous_usage_stats": [
        {"choices": [{}], **usage(1000, 0)},
        {"choices": [{}], **usage(1000, 20)},
        {"choices": [], **READS["vLLM"]},
    ],
    "Moonshot, in the choice": [
        {"choices": [{"index": 0, "delta": {}, **READS["Moonshot"]}]},
    ],
    "Responses": [
        {"type": "response.created", "response": {"usage": None}},
        {
            "type": "response.completed",
            "response": {
                "usage": {
                    "input_tokens": 1000,
                    "input_tokens_details": {"cached_tokens": 640},
                    "output_tokens": 50,
                }
            },
        },
    ],
}
MESSAGES: Mapping[str, list[Said]] = {
    "the prompt at the start, the output at the end": [
        {"type": "message_start", "message": READS["Anthropic"] | {"role": "assistant"}},
        {"type": "message_delta", "usage": {"output_tokens": 50}},
    ],
    "the prompt again at the end, which is not added": [
        {"type": "message_start", "message": READS["Anthropic"]},
        {"type": "message_delta", **READS["Anthropic"]},
    ],
    "another prompt at the end, which counts": [
        {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}},
        {"type": "message_delta", **READS["Anthropic"]},
    ],
    "null at the end, which says nothing": [
        {"type": "message_start", "message": READS["Anthropic"]},
        {
            "type": "message_delta",
            "usage": {
                "input_tokens": None,
                "cache_read_input_tokens": None,
                "cache_creation_input_tokens": None,
                "output_tokens": 50,
            },
        },
    ],
}
CANNOT_BE: Mapping[str, tuple[list[Said], Counted]] = {
    "nothing": ([], NOTHING),
    "an empty usage": ([{"usage": {}}], NOTHING),
    "no details": ([usage(1000, 50)], Counted(1000, None, 0, 0, 50)),
    "details of null": (
        [usage(1000, 50, prompt_tokens_details=None)],
        Counted(1000, None, 0, 0, 50),
    ),
    "cached null": ([usage(1000, 50, **details(cached_tokens=None))], Counted(1000, output=50)),
    "more hits than prompt": ([usage(1000, 50, cached_tokens=1001)], Counted(1000, output=50)),
    "negative hits": ([usage(1000, 50, cached_tokens=-1)], Counted(1000, output=50)),
    "hits as text": ([usage(1000, 50, cached_tokens="640")], Counted(1000, output=50)),
    "hits as a float": ([usage(1000, 50, cached_tokens=640.0)], Counted(1000, output=50)),
    "hits as a boolean": ([usage(1000, 50, cached_tokens=True)], Counted(1000, output=50)),
    "two hits that differ": (
        [usage(1000, 50, **details(cached_tokens=640), cached_tokens=512)],
        Counted(1000, output=50),
    ),
    "DeepSeek's two that do not make the prompt": (
        [usage(1000, 50, prompt_cache_hit_tokens=640, prompt_cache_miss_tokens=361)],
        Counted(1000, output=50),
    ),
    "more writes than misses": (
        [usage(1000, 50, **details(cached_tokens=640, cache_write_tokens=361))],
        Counted(1000, output=50),
    ),
    "a negative prompt": ([usage(-1, 50)], NOTHING),
    "a prompt as a boolean": ([usage(True, 50)], NOTHING),
    "a prompt as a float": ([usage(12.0, 50)], NOTHING),  # type: ignore[arg-type]
    "no prompt": ([{"usage": {"completion_tokens": 50}}], NOTHING),
    "a negative output": ([usage(1000, -1)], NOTHING),
    "two prompts in one stream": (
        [usage(1000, 50, cached_tokens=640), usage(900, 50, cached_tokens=640)],
        NOTHING,
    ),
    "two hits in one stream": (
        [usage(1000, 50, cached_tokens=640), usage(1000, 50, cached_tokens=0)],
        NOTHING,
    ),
    "an output that shrinks": (
        [usage(1000, 50, cached_tokens=640), usage(1000, 49, cached_tokens=640)],
        NOTHING,
    ),
    "a third that agrees with the first": (
        [usage(1000, 50), usage(900, 50), usage(1000, 50)],
        NOTHING,
    ),
    "Anthropic's negative read": (
        [{"usage": {"input_tokens": 5, "cache_read_input_tokens": -1, "output_tokens": 3}}],
        Counted(output=3),
    ),
    "Anthropic's hour above its writes": (
        [
            {
                "usage": {
                    "input_tokens": 5,
                    "cache_read_input_tokens": 0,
                    "cache_creation_input_tokens": 7,
                    "cache_creation": {"ephemeral_1h_input_tokens": 8},
                    "output_tokens": 3,
                }
            }
        ],
        Counted(output=3),
    ),
}


def read(*said: Said, is_partial: bool = False) -> Counted:
    reader = UsageReader(is_partial)
    for one in said:
        reader.read(one)
    return reader.counted


def bill(seen: Counted, most: int = 4000) -> Usage:
    return billed(seen, most_prompt=most, sent=3, most_output=100)


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


@pytest.mark.parametrize("case", IN_STREAMS)
def test_a_stream_costs_what_the_whole_answer_does(case):
    assert Usage(hit_device=640, miss=360, output=50) == bill(read(*IN_STREAMS[case]))


@pytest.mark.parametrize("case", MESSAGES)
def test_a_stream_of_messages_costs_what_the_whole_message_does(case):
    seen = read(*MESSAGES[case], is_partial=True)
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
# tokens, the first time and later.
VLLM_COLD = {
    "prompt_tokens": 331,
    "total_tokens": 335,
    "completion_tokens": 4,
    "prompt_tokens_details": {
        "cached_tokens": 0,
        "created_cache_tokens": 256,
        "multimodal_tokens": None,
    },
    "completion_tokens_details": None,
}
VLLM_STREAM = {
    "prompt_tokens": 331,
    "total_tokens": 335,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 256, "created_cache_tokens": 0},
}
VLLM_RESPONSE = {
    "input_tokens": 331,
    "input_tokens_details": {
        "cached_tokens": 256,
        "cache_write_tokens": 0,
        "input_tokens_per_turn": [],
        "cached_tokens_per_turn": [],
    },
    "output_tokens": 4,
    "output_tokens_details": {
        "reasoning_tokens": 0,
        "tool_output_tokens": 0,
        "output_tokens_per_turn": [],
        "tool_output_tokens_per_turn": [],
    },
    "total_tokens": 335,
}
VLLM_MESSAGE = {
    "input_tokens": 75,
    "output_tokens": 4,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 256,
}
# LiteLLM's proxy 1.106.2, asked as above before a stand-in and before a server of ours.
LITELLM_CHUNK = {
    "prompt_tokens": 331,
    "completion_tokens": 4,
    "total_tokens": 335,
    "completion_tokens_details": {"reasoning_tokens": 0, "text_tokens": 4},
    "prompt_tokens_details": {"cached_tokens": 256},
}
LITELLM_TEXT = {
    **LITELLM_CHUNK,
    "completion_tokens_details": None,
    "prompt_tokens_details": {
        **dict.fromkeys(("audio_tokens", "text_tokens", "image_tokens", "video_tokens")),
        "cached_tokens": 256,
    },
}
LITELLM_RESPONSE = {
    "input_tokens": 331,
    "input_tokens_details": {
        **dict.fromkeys(("audio_tokens", "text_tokens", "image_tokens", "video_tokens")),
        "cached_tokens": 256,
        "cached_tokens_details": dict.fromkeys(("text_tokens", "audio_tokens", "image_tokens")),
        "cache_write_tokens": 0,
    },
    "output_tokens": 4,
    "output_tokens_details": {"audio_tokens": None, "reasoning_tokens": 0, "text_tokens": None},
    "total_tokens": 335,
    "cost": None,
}
LITELLM_DELTA = {"input_tokens": 75, "output_tokens": 4, "cache_read_input_tokens": 256}
COLD = Usage(miss=331, cache_write=256, output=4)
HIT = Usage(hit_device=256, miss=75, output=4)
RECORDED: Mapping[str, tuple[list[Said], bool, Usage]] = {
    "chat, cold": ([{"usage": VLLM_COLD}], False, COLD),
    "chat, streamed": ([{"choices": [], "usage": VLLM_STREAM}], False, HIT),
    "Responses": ([{"usage": VLLM_RESPONSE}], False, HIT),
    "Messages": ([{"usage": VLLM_MESSAGE}], True, HIT),
    "Messages, streamed: its start counts all as input": (
        [
            {
                "type": "message_start",
                "message": {"usage": {"input_tokens": 331, "output_tokens": 0}},
            },
            {"type": "message_delta", "usage": VLLM_MESSAGE},
        ],
        True,
        HIT,
    ),
}


LITELLM: Mapping[str, tuple[list[Said], bool, Usage]] = {
    "chat, streamed, beside an empty choice": (
        [{"choices": [{"index": 0, "delta": {}}], "usage": LITELLM_CHUNK}], False, HIT,
    ),
    "completions": ([{"usage": LITELLM_TEXT}], False, HIT),
    "Responses": ([{"usage": LITELLM_RESPONSE}], False, HIT),
    "Messages, streamed": ([{"type": "message_delta", "usage": LITELLM_DELTA}], True, HIT),
}  # fmt: skip
# llama.cpp's server (xllamacpp 2026.10.11549) on a tiny GGUF file, asked through a relay: prompts
# of 308 and 267 tokens, the first time and again.
LLAMA_TIMES = {"cache_n": 307, "prompt_n": 1, "prompt_ms": 0.449, "predicted_n": 4}
LLAMA_USAGE = {
    "completion_tokens": 4,
    "prompt_tokens": 308,
    "total_tokens": 312,
    "prompt_tokens_details": {"cached_tokens": 307},
}
LLAMA_RESPONSE = {
    "input_tokens": 308,
    "output_tokens": 4,
    "total_tokens": 312,
    "input_tokens_details": {"cached_tokens": 307},
}
LLAMA_START = {"cache_read_input_tokens": 307, "input_tokens": 1, "output_tokens": 0}
LLAMA_FIRST = {"cache_n": 307, "prompt_n": 0, "prompt_ms": 0.0, "predicted_n": 0}
LLAMA_HIT = Usage(hit_device=307, miss=1, output=4)
LLAMA: Mapping[str, tuple[list[Said], bool, Usage]] = {
    "completions, cold": (
        [
            usage(267, 4, **details(cached_tokens=0))
            | {"timings": {"cache_n": 0, "prompt_n": 267, "prompt_ms": 6.756, "predicted_n": 4}}
        ],
        False,
        Usage(miss=267, output=4),
    ),
    "chat": ([{"usage": LLAMA_USAGE, "timings": LLAMA_TIMES}], False, LLAMA_HIT),
    "chat, streamed with timings_per_token and return_progress": (
        [
            {
                "choices": [{"finish_reason": None, "index": 0, "delta": {"content": None}}],
                "timings": LLAMA_FIRST,
                "prompt_progress": {"total": 308, "cache": 307, "processed": 307, "time_ms": 0},
            },
            {
                "choices": [{"finish_reason": None, "index": 0, "delta": {"content": "a"}}],
                "timings": {**LLAMA_TIMES, "predicted_n": 1},
            },
            {"choices": [{"finish_reason": "length", "index": 0, "delta": {}}]},
            {"choices": [], "usage": LLAMA_USAGE, "timings": LLAMA_TIMES},
        ],
        False,
        LLAMA_HIT,
    ),
    "completions, streamed: its last choice has the usage": (
        [
            {
                "choices": [{"text": "", "index": 0, "logprobs": None, "finish_reason": "length"}],
                "usage": LLAMA_USAGE,
                "timings": LLAMA_TIMES,
            }
        ],
        False,
        LLAMA_HIT,
    ),
    "Messages": ([{"usage": {**LLAMA_START, "output_tokens": 4}}], True, LLAMA_HIT),
    "Messages, streamed: the prompt at the start alone": (
        [
            {"type": "message_start", "message": {"usage": LLAMA_START}},
            {"type": "message_delta", "usage": {"output_tokens": 4}},
        ],
        True,
        LLAMA_HIT,
    ),
    "Responses": ([{"usage": LLAMA_RESPONSE}], False, LLAMA_HIT),
    "Responses, streamed, with timings beside": (
        [
            {"type": "response.created", "response": {"status": "in_progress"}},
            {
                "type": "response.completed",
                "response": {"status": "completed", "usage": LLAMA_RESPONSE},
                "timings": LLAMA_TIMES,
            },
        ],
        False,
        LLAMA_HIT,
    ),
}


@pytest.mark.parametrize("case", [*RECORDED.values(), *LITELLM.values(), *LLAMA.values()])
def test_a_real_endpoint_is_billed_as_it_counts(case):
    said, is_partial, expected = case
    assert expected == bill(read(*said, is_partial=is_partial))


def test_messages_never_count_reads_as_part_of_their_input():
    """Also where no read is told: Anthropic's `input_tokens` is the rest of the prompt."""
    seen = read({"usage": {"input_tokens": 7, "output_tokens": 2}}, is_partial=True)
    assert Counted(7, None, 0, 0, 2) == seen


def test_an_hour_of_keeping_is_told_apart():
    split = {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20}
    said = {"input_tokens": 5, "cache_read_input_tokens": 0, "output_tokens": 1}
    writes = {"cache_creation_input_tokens": 30, "cache_creation": split}
    usage = bill(read({"usage": said | writes}, is_partial=True))
    assert Usage(miss=35, cache_write=10, cache_write_1h=20, output=1) == usage


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

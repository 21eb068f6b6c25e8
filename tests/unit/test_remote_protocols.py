"""A request in the words of engines elsewhere, and their answers in ours."""

from contextlib import nullcontext
from typing import Any

import pytest

from cachesvc.vllm.identity import tenant_of
from engine.bounds import MAX_SEED
from engine.errors import InvalidParameter
from engine.remote.protocol import SequenceAsk, cached_of
from engine.remote.requests import salt_of
from engine.remote.sglang import SGLang
from engine.remote.vllm import TAG, Completions, Generate
from engine.request import SamplingParams
from tests.support.requests import request
from tiers.blocks.contents import Content
from tiers.blocks.keys import CacheScope

COMPLETIONS = Completions(priorities=True, grammars=True, tagged=True)
GENERATE = Generate(priorities=False, grammars=True)


def ask(index: int = 0, cache: bool = True, room: int = 50, **params: Any) -> SequenceAsk:
    asked = request([1, 2, 3], params=SamplingParams(**params), cache=cache)
    about = {"name": "r:0", "model": "m", "end": frozenset({0}), "salt": "s"}
    return SequenceAsk(request=asked, index=index, room=room, **about)


def fields(index: int = 0, **params: Any) -> dict[str, Any]:
    return COMPLETIONS.body(ask(index, **params))


def test_every_parameter_is_told_to_vllm():
    """Nothing is dropped in silence: what is not here by its name is known to be used here."""
    here = {"n"}  # a request each
    for told in (fields(), GENERATE.body(ask())["sampling_params"]):
        assert set(SamplingParams.__dataclass_fields__) - here <= set(told)


def test_the_models_ends_are_stop_tokens_unless_they_are_ignored():
    assert [0, 9] == fields(stop_token_ids=(9,))["stop_token_ids"]
    assert [9] == fields(stop_token_ids=(9,), ignore_eos=True)["stop_token_ids"]


def test_an_answer_ends_with_the_context():
    assert [50, 50, 7, 1] == [fields(max_tokens=most)["max_tokens"] for most in (None, 900, 7, 0)]
    assert 50 == fields(min_tokens=60)["min_tokens"]


def test_further_samples_have_seeds_of_their_own_and_tell_no_prompt():
    first, second = (fields(index, seed=5, n=2, prompt_logprobs=3) for index in (0, 1))
    assert 5 == first["seed"] != second["seed"]
    assert (3, None) == (first["prompt_logprobs"], second["prompt_logprobs"])
    assert (False, True) == (first["stream"], second["stream"]), "vLLM streams none of a prompt"
    assert 0 <= fields(seed=MAX_SEED)["seed"] < 1 << 63
    assert fields(seed=-1)["seed"] >= 0  # vLLM takes -1 for none


def test_a_request_without_the_cache_is_neither_read_nor_stored():
    assert GENERATE.body(ask(cache=False))["sampling_params"]["skip_reading_prefix_cache"] is True
    told = COMPLETIONS.body(ask(cache=False))
    assert {"id": "r:0", "store": False} == told["kv_transfer_params"][TAG]


def test_a_tenants_salt_is_the_same_in_vllm_and_in_our_scopes():
    assert b"\x00\xffsalt" == tenant_of(salt_of(b"\x00\xffsalt"))
    assert [b"theirs", b"hex:zz"] == [tenant_of("theirs"), tenant_of("hex:zz")]


@pytest.mark.parametrize(("num_bytes", "fits"), [(62, True), (63, False)])
def test_a_salt_that_vllm_cannot_take_is_refused_by_name(num_bytes, fits):
    scope = CacheScope(tenant=bytes(num_bytes))
    asked = request([1], scope=scope)
    assert fits == (len(salt_of(scope.tenant)) <= 128)
    expected = nullcontext() if fits else pytest.raises(InvalidParameter, match="has 63 bytes")
    with expected:
        COMPLETIONS.check(asked)


def test_what_keeps_blocks_apart_is_refused_by_name():
    asked = request([1, 2, 3], contents=(Content(0, 1, b"d" * 16),))
    for protocol in (COMPLETIONS, SGLang(deterministic=True)):
        with pytest.raises(InvalidParameter) as refused:
            protocol.check(asked)
        assert "cache_salt" == refused.value.param


def test_logprobs_are_the_tokens_own_and_the_likely_ones_in_order():
    """Of `/v1/completions`, `/inference/v1/generate` and SGLang."""
    top = {"token_id:5": -3.0, "token_id:2": -1.0, "token_id:1": -0.5}
    logprobs: dict[str, Any] = {"token_logprobs": [-3.0], "top_logprobs": [top]}
    choice = {"token_ids": [5], "finish_reason": None, "logprobs": logprobs}
    asked = ask(logprobs=2)
    [told] = COMPLETIONS.told({"choices": [choice]}, asked, 0).logprobs
    assert (5, -3.0, ((1, -0.5), (2, -1.0)), 0) == told_of(told)
    entries = [{"token_id": t, "logprob": v, "rank": r} for t, v, r in RANKED]
    content = [{**entries[0], "top_logprobs": entries}]
    choice = {"token_ids": [5], "finish_reason": None, "logprobs": {"content": content}}
    [told] = GENERATE.told({"choices": [choice]}, asked, 0).logprobs
    assert (5, -3.0, ((1, -0.5), (2, -1.0)), 9) == told_of(told)
    about = {
        "finish_reason": None,
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "output_token_logprobs": [[-9.0, 7, None], [-3.0, 5, None]],
        "output_top_logprobs": [[], [[-0.5, 1, None], [-1.0, 2, None]]],
    }
    event = {"output_ids": [7, 5], "meta_info": about}
    [told] = SGLang(deterministic=True).told(event, asked, 1).logprobs
    assert (5, -3.0, ((1, -0.5), (2, -1.0)), 0) == told_of(told)


RANKED = ((5, -3.0, 9), (1, -0.5, 1), (2, -1.0, 2))


def told_of(told: Any) -> tuple[Any, ...]:
    return (told.token, told.logprob, told.top, told.rank)


def test_the_prompts_logprobs_are_ranked():
    entry = {"2": {"logprob": -3.0, "rank": 9}, "1": {"logprob": -0.5, "rank": 1}}
    choice = {"token_ids": [5], "finish_reason": None, "prompt_logprobs": [None, entry, entry]}
    with pytest.raises(KeyError):
        COMPLETIONS.told({"choices": [choice]}, ask(prompt_logprobs=1), 0)
    choice["prompt_logprobs"] = [None, entry, {"3": entry["2"], "1": entry["1"]}]
    told = COMPLETIONS.told({"choices": [choice]}, ask(prompt_logprobs=1), 0).prompt_logprobs
    assert [(2, -3.0, ((1, -0.5),), 9), (3, -3.0, ((1, -0.5),), 9)] == list(map(told_of, told))


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        *((unreadable, None) for unreadable in (None, 5, {"prompt_tokens": 3})),
        ({"prompt_tokens": 3, "prompt_tokens_details": None}, None),
        ({"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}, None),
        *(
            ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": told}}, known)
            for told, known in ((0, 0), (3, 3), (4, None), (-1, None), (True, None), ("1", None))
        ),
    ],
)
def test_a_count_that_cannot_be_is_none(usage, cached):
    hits = cached_of(usage, 3)
    assert cached == (None if hits is None else sum(hits.values()))


@pytest.mark.parametrize("told", [5, {"moon": 3}, {"host": 2}, {"device": True, "host": 2}])
def test_tiers_that_cannot_be_are_the_device(told):
    details = {"cached_tokens": 3, "tiers": told}
    assert {"device": 3} == cached_of({"prompt_tokens": 3, "prompt_tokens_details": details}, 3)

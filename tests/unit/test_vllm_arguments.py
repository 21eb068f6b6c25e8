"""vLLM's own arguments, and a request in vLLM's words."""

from array import array
from typing import Any

import pytest

from cachesvc.config.errors import ConfigError
from cachesvc.server.vllm.arguments import read_options, vllm_flags
from cachesvc.server.vllm.params import check_served, sampling_of
from cachesvc.vllm.identity import salt_of, tenant_of
from engine.bounds import MAX_SEED
from engine.errors import InvalidParameter
from engine.request import Request, SamplingParams
from tiers.blocks.contents import Content
from tiers.blocks.keys import CacheScope


def test_options_are_read_with_their_values_and_without() -> None:
    words = ["--vllm.tensor-parallel-size", "4", "--vllm.enforce-eager", "--vllm.seed=7"]
    options = read_options(words, [])
    assert {"tensor-parallel-size": "4", "enforce-eager": True, "seed": "7"} == options
    assert ["--tensor-parallel-size", "4", "--enforce-eager", "--seed", "7"] == vllm_flags(options)


def test_settings_of_a_file_are_options_too() -> None:
    given = {"max_model_len": 2048, "enforce-eager": True, "async-scheduling": False}
    assert ["--max-model-len", "2048", "--enforce-eager", "--no-async-scheduling"] == vllm_flags(
        given
    )


@pytest.mark.parametrize("words", [["--devise", "cpu"], ["cpu"], ["--vllm.", "4"]])
def test_whatever_else_stands_there_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        read_options(words, [])


@pytest.mark.parametrize("name", ["model", "kv-transfer-config", "kv_transfer_config"])
def test_what_the_server_decides_is_refused_with_what_to_use(name: str) -> None:
    with pytest.raises(ConfigError, match="use"):
        vllm_flags({name: "x"})


def request(**params: Any) -> Request:
    return Request(
        request_id="r",
        tokens=array("i", [1, 2, 3]),
        params=SamplingParams(**params),
        scope=CacheScope(),
    )


def fields(index: int = 0, **params: Any) -> dict[str, Any]:
    return sampling_of(request(**params), index, end={0}, name="r:0", max_tokens=50)


def test_the_models_ends_are_stop_tokens_unless_they_are_ignored() -> None:
    assert [0, 9] == fields(stop_token_ids=(9,))["stop_token_ids"]
    assert [9] == fields(stop_token_ids=(9,), ignore_eos=True)["stop_token_ids"]


def test_an_answer_ends_with_the_context() -> None:
    assert [50, 50, 7, 1] == [fields(max_tokens=most)["max_tokens"] for most in (None, 900, 7, 0)]
    assert 50 == fields(min_tokens=60)["min_tokens"]


def test_further_samples_have_seeds_of_their_own_and_tell_no_prompt() -> None:
    first, second = (fields(index, seed=5, n=2, prompt_logprobs=3) for index in (0, 1))
    assert 5 == first["seed"] != second["seed"]
    assert (3, None) == (first["prompt_logprobs"], second["prompt_logprobs"])
    assert 0 <= fields(seed=MAX_SEED)["seed"] < 1 << 63
    assert fields(seed=-1)["seed"] >= 0  # vLLM takes -1 for none


def test_a_request_without_the_cache_is_neither_read_nor_stored() -> None:
    made = sampling_of(
        Request(
            request_id="r",
            tokens=array("i", [1]),
            params=SamplingParams(),
            scope=CacheScope(),
            cache=False,
        ),
        0,
        end=(),
        name="r:0",
        max_tokens=5,
    )
    assert made["skip_reading_prefix_cache"] is True
    assert {"id": "r:0", "store": False} == made["extra_args"]["kv_transfer_params"]["cachesvc"]


def test_contents_are_refused_by_name() -> None:
    asked = Request(
        request_id="r",
        tokens=array("i", [1, 2, 3]),
        params=SamplingParams(),
        scope=CacheScope(),
        contents=(Content(0, 1, b"d" * 16),),
    )
    with pytest.raises(InvalidParameter) as refused:
        check_served(asked)
    assert "contents" == refused.value.param


def test_a_tenants_salt_is_the_same_in_vllm_and_in_our_scopes() -> None:
    assert b"\x00\xffsalt" == tenant_of(salt_of(b"\x00\xffsalt"))
    assert [b"theirs", b"hex:zz"] == [tenant_of("theirs"), tenant_of("hex:zz")]

"""vLLM's own arguments."""

import pytest

from cachesvc.config.errors import ConfigError
from cachesvc.server.vllm.arguments import read_options, vllm_flags


def test_options_are_read_with_their_values_and_without():
    words = ["--vllm.tensor-parallel-size", "4", "--vllm.enforce-eager", "--vllm.seed=7"]
    options = read_options(words, [])
    assert {"tensor-parallel-size": "4", "enforce-eager": True, "seed": "7"} == options
    assert ["--tensor-parallel-size", "4", "--enforce-eager", "--seed", "7"] == vllm_flags(options)


def test_settings_of_a_file_are_options_too():
    given = {"max_model_len": 2048, "enforce-eager": True, "async-scheduling": False}
    assert ["--max-model-len", "2048", "--enforce-eager", "--no-async-scheduling"] == vllm_flags(
        given
    )


@pytest.mark.parametrize("words", [["--devise", "cpu"], ["cpu"], ["--vllm.", "4"]])
def test_whatever_else_stands_there_is_refused(words):
    with pytest.raises(ConfigError):
        read_options(words, [])


@pytest.mark.parametrize("name", ["model", "kv-transfer-config", "kv_transfer_config"])
def test_what_the_server_decides_is_refused_with_what_to_use(name):
    with pytest.raises(ConfigError, match="use"):
        vllm_flags({name: "x"})

"""Models that keep several kinds of KV, each in blocks of its own: windows or recurrent states
beside full attention. Their tokens are vLLM's own, from every tier and after both have restarted.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.redis_server import redis_server
from tests.vllm.conftest import started
from tests.vllm.processes import Engine, RunningNode

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.timeout(900)]

COMMON: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}


def gemma3() -> PreTrainedModel:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**COMMON, head_dim=32, sliding_window=256, layer_types=kinds)
    )


def gpt_oss() -> PreTrainedModel:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 32.0}
    rope |= {"beta_slow": 1.0, "original_max_position_embeddings": 2048, "truncate": False}
    more: dict[str, Any] = {"num_local_experts": 4, "rope_parameters": rope, **EXPERTS}
    kinds = ["sliding_attention", "full_attention"] * 2
    return GptOssForCausalLM(
        GptOssConfig(**COMMON, **more, head_dim=32, sliding_window=128, layer_types=kinds)
    )


def qwen3_next() -> PreTrainedModel:
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "head_dim": 64}
    dims = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    experts = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64} | EXPERTS
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(**COMMON, **heads, **dims, **experts, num_experts=4, layer_types=kinds)
    )


# dtype and tokens of a block. vLLM's CPU build has one dtype for Qwen3-Next. vLLM computes 640
# tokens in a step, so a state in the middle of a prompt is that at the end of a step.
MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str, int]] = {
    "gemma3": (gemma3, "float32", 128),
    "gpt_oss": (gpt_oss, "float32", 128),
    "qwen3_next": (qwen3_next, "bfloat16", 640),
}


def saved(make: Callable[[], PreTrainedModel], folder: Path) -> Path:
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(3)  # else every answer is the same token
    model.save_pretrained(folder)
    return folder


def prompt(seed: int, length: int) -> list[int]:
    return [(place * 7919 + seed * 31) % 900 + 50 for place in range(length)]


@pytest.mark.parametrize("name", MODELS)
def test_every_group_resumes_with_the_same_tokens(name: str, tmp_path: Path) -> None:
    make, dtype, block = MODELS[name]
    folder = saved(make, tmp_path / name)
    options = {"skip_tokenizer_init": True, "dtype": dtype, "max_num_batched_tokens": 640}
    long = prompt(1, 2 * block + 700)
    prompts = {
        "whole": long,
        "longer": long + prompt(5, 300),
        "parting": long[: block + 100] + prompt(7, 500),
    }
    with started(folder, None, tmp_path, **options) as alone:
        expected = {key: alone.generate(ids)[0]["tokens"] for key, ids in prompts.items()}
    assert 1 < len({tuple(tokens) for tokens in expected.values()}), "answers tell prompts apart"

    def check(engine: Engine, key: str, tier: str | None) -> None:
        """The answer is vLLM's own, and all that can be of its prompt was a hit of this tier."""
        engine.forget()
        (answer,) = engine.generate(prompts[key])
        assert expected[key] == answer["tokens"], (key, tier, answer)
        most = (len(prompts[key]) - 1) // block * block
        found = block if key == "parting" else (len(long) - 1) // block * block
        hits = {tier: min(most, found)} if tier is not None else {}
        assert hits == answer["hits"], (key, answer)

    with redis_server(tmp_path) as url, Redis.from_url(url) as store:
        more = ("--remote-url", url, "--remote-writes", "all")
        one, two = (RunningNode(tmp_path / each, more=more) for each in ("one", "two"))
        try:
            one.start()
            with started(folder, one, tmp_path, **options) as engine:
                check(engine, "whole", None)
                for key in ("whole", "parting", "longer"):
                    check(engine, key, "host")
                engine.forget()
                one.until_on_disk()
            one.stop()
            one.start()
            two.start()
            with started(folder, one, tmp_path, **options) as engine:
                check(engine, "whole", "disk")
            assert store.dbsize()
            with started(folder, two, tmp_path, **options) as engine:
                check(engine, "whole", "remote")
        finally:
            one.kill()
            two.kill()

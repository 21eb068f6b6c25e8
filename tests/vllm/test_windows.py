"""A model with sliding windows beside full attention, as `serve --engine vllm` starts it."""

from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from cachesvc.server.vllm.arguments import has_windows
from tests.vllm.conftest import started
from tests.vllm.processes import RunningNode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

WINDOW = 256
PROMPT = [(place * 7919) % 900 + 50 for place in range(700)]
WHOLE = (len(PROMPT) - 1) // 128 * 128


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """Random weights: three layers with a window, then one that sees everything."""
    config = Gemma3TextConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(3)  # else every answer is the same token
    model.save_pretrained(tmp_path / "gemma")
    return tmp_path / "gemma"


def test_windows_beside_full_attention_hit_with_the_same_tokens(
    gemma: Path, node: RunningNode, tmp_path: Path
) -> None:
    assert has_windows(gemma)
    options = {"disable_hybrid_kv_cache_manager": True, "skip_tokenizer_init": True}
    with started(gemma, node, tmp_path, **options) as engine:
        (cold,) = engine.generate(PROMPT)
        assert ({}, 0) == (cold["hits"], cold["cached"])
        node.until_on_disk()
        engine.forget()
        (host,) = engine.generate(PROMPT)
        assert ({"host": WHOLE}, cold["tokens"]) == (host["hits"], host["tokens"])

"""What a slow disk loads later than vLLM computes it is computed, and says so; and a disk that gets
fast again is used again."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.vllm.processes import RunningNode
from tests.vllm.test_connector import saved
from tests.vllm.throttled import forget_pages, throttle
from tiers.transfer.economy import RETRY_EVERY

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

BLOCK = 128
WHOLE = 2 * BLOCK
SLOW = 8_000_000  # bytes a second: a block of 1.6 MB takes longer than its 128 tokens
*PROMPTS, FIRST = [
    [(place * 7919 + seed * 104_729) % 900 + 50 for place in range(WHOLE + 5)]
    for seed in range(RETRY_EVERY + 19)
]


def shallow():
    """Of the default model's layers the first eight, with numbers of their own: as much longer than
    an unhindered load takes, in a quarter of the time."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    sizes = {"vocab_size": 1000, "hidden_size": 576, "intermediate_size": 1536}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, **heads, num_hidden_layers=8, max_position_embeddings=4096)
    )


@pytest.fixture
def stored(started, tmp_path):
    """An engine over a node whose disk alone has all prompts, and what bounds its reads."""
    with throttle(tmp_path) as bound:
        node = RunningNode(tmp_path)
        node.start("1GiB", "4GiB")
        try:
            folder = saved(shallow, tmp_path / "shallow")
            with started(folder, node, tmp_path, skip_tokenizer_init=True) as engine:
                cold = [engine.generate(prompt, max_tokens=1)[0]["tokens"] for prompt in PROMPTS]
                engine.forget()
                node.until_on_disk()
                node.stop()
                forget_pages(node.disk)
                node.start("1GiB", "4GiB")
                engine.generate(FIRST)  # it opens the disk, before that is slow
                bound.add(node.pid)
                yield engine, node, bound, cold
        finally:
            node.kill()


def test_what_loads_slower_than_it_computes_is_computed_until_the_disk_is_fast(stored):
    engine, node, bound, cold = stored
    bound.set(SLOW)
    asked = iter(zip(PROMPTS, cold, strict=True))
    trials = []  # hit tokens, by prompt

    def ask():
        prompt, tokens = next(asked)
        (answer,) = engine.generate(prompt, max_tokens=1)
        assert tokens == answer["tokens"]
        hits, misses = answer["hits"].get("disk", 0), answer["misses"].get("slower_than_compute", 0)
        assert hits + misses in (0, WHOLE), answer
        trials.append(hits)
        return hits, misses

    while (0, WHOLE) != ask():
        assert len(trials) < 12, "it was loaded, or vLLM lost patience, often enough to know"
    assert node.pool()["disk_hits"] > 0, "nothing was known, so it was tried"
    bound.set(0)
    while (WHOLE, 0) != ask():
        pass  # a block that is fetched after so many prompts tells how fast it is
    assert (WHOLE, 0) == ask()

"""Every attention path against the reference, on random pools."""

from pathlib import Path

import pytest
import torch

from engine.attention.base import AttentionCall, AttentionOptions, ReferenceAttention
from engine.attention.cpu import CpuAttention
from tests.parity.attending import attended, span
from tests.support.threads import beside
from tiers.blocks.layout import BlockLayout, LayerLayout

LAYERS, KV_HEADS, GROUPS, DIM, BLOCK = 2, 3, 3, 32, 16
OPTIONS = {
    "plain": AttentionOptions(scaling=DIM**-0.5),
    "window": AttentionOptions(scaling=DIM**-0.5, window=21),
    "softcap": AttentionOptions(scaling=0.3, softcap=5.0),
    "both": AttentionOptions(scaling=0.3, window=40, softcap=5.0),
    "sinks": AttentionOptions(scaling=0.3, window=40, sinks=torch.linspace(-1, 4, 9)),
}


def new_pool(dtype):
    generator = torch.Generator().manual_seed(1)
    shape = (40, LAYERS, 2, BLOCK, KV_HEADS, DIM)
    return torch.randn(shape, generator=generator).to(dtype)


ONE, OTHER = range(20), range(20, 40)  # block tables
STEPS = [
    [span(1, 0, 30, ONE), span(2, 45, 20, OTHER)],  # a cold chunk; a prefix that stands already
    [span(1, 30, 1, ONE), span(2, 65, 1, OTHER)],
    [span(1, 31, 170, ONE), span(2, 66, 1, OTHER)],  # over several tiles; decoding beside it
    [span(1, 201, 2, ONE)],
    [span(2, 67, 3, OTHER), span(1, 203, 1, ONE)],
    [span(1, 200, 4, ONE, write_kv=False)],
]


PLAIN = (LayerLayout(KV_HEADS, DIM, DIM),) * LAYERS
LATENT = LayerLayout(1, 24, 16, shared=True)  # as DeepSeek's
SHAPES = {
    "latents": (LATENT, LATENT),
    "two sizes of head": (LayerLayout(2, 16, 16), LayerLayout(1, 32, 32)),
    "values smaller than keys": (LayerLayout(2, 24, 8), LayerLayout(4, 24, 8)),
}


ANY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def agree(pool, layers, options, budget, num_heads=36):
    """Both paths give and write the same in all steps."""
    pools = pool.clone(), pool.clone()
    reference = ReferenceAttention(pools[0], layers)
    fast = CpuAttention(pools[1], layers, budget_bytes=budget)
    for seed, spans in enumerate(STEPS):
        given = layers, spans, options, num_heads, seed
        expected, actual = attended(reference, *given), attended(fast, *given)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(pools[0], pools[1]), "both paths write the same"


@ANY_DTYPE
@pytest.mark.parametrize("budget", [1 << 30, 0], ids=["ample", "none"])
@pytest.mark.parametrize("layers", SHAPES.values(), ids=SHAPES)
def test_layers_of_other_shapes_agree_with_the_reference(layers, dtype, budget):
    shape = BlockLayout(layers, BLOCK, "float32").shape
    pool = torch.randn(40, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    agree(pool, layers, OPTIONS["plain"], budget)


@ANY_DTYPE
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("budget", [1 << 30, 500_000, 0], ids=["ample", "one copy", "none"])
def test_working_copies_agree_with_the_reference(options, dtype, budget):
    agree(new_pool(dtype), PLAIN, options, budget, num_heads=KV_HEADS * GROUPS)


@pytest.mark.parametrize(
    ("length", "failed", "spans"),
    [
        (20, span(1, 20, 8, ONE), [span(1, 20, 8, ONE)]),
        (30, span(1, 10, 8, ONE), [span(1, 30, 1, ONE)]),
    ],
    ids=["half way", "further back"],
)
def test_a_step_that_failed_leaves_nothing_in_the_copy(length, failed, spans):
    pool = new_pool(torch.float32)
    fast, options = CpuAttention(pool), OPTIONS["plain"]
    attended(fast, PLAIN, [span(1, 0, length, ONE)], options, KV_HEADS * GROUPS, seed=1)
    fast.begin([failed])
    noise = torch.ones(8, KV_HEADS * GROUPS, DIM)
    fast.attend(AttentionCall(0, noise, noise[:, :KV_HEADS], noise[:, :KV_HEADS], options))
    given = PLAIN, spans, options, KV_HEADS * GROUPS, 2
    expected = attended(ReferenceAttention(pool.clone()), *given)
    torch.testing.assert_close(attended(fast, *given), expected)


def test_a_token_gets_the_same_bits_alone_and_beside_others():
    """Neighbouring spans of one token are written together; one that writes nothing is between."""
    spans = [span(1, 30, 1, ONE), span(2, 65, 1, OTHER), span(3, 7, 1, ONE, write_kv=False)]
    pool, options = new_pool(torch.float32), OPTIONS["plain"]
    query = torch.randn(3, KV_HEADS * GROUPS, DIM)
    key, value = torch.randn(2, 3, KV_HEADS, DIM)
    together = CpuAttention(pool.clone())
    together.begin(spans)
    call = AttentionCall(0, query, key, value, options)
    expected = together.attend(call)
    for row, one in enumerate(spans):
        alone, rows = CpuAttention(pool.clone()), slice(row, row + 1)
        alone.begin([one])
        assert torch.equal(expected[rows], alone.attend(call.of(rows)))


@pytest.mark.parametrize("budget", [1 << 30, 0], ids=["ample", "none"])
def test_bfloat16_queries_are_attended_in_float32(budget):
    """The answer is rounded once, at the end."""
    pool = new_pool(torch.bfloat16)
    spans = [span(1, 45, 20, OTHER), span(2, 33, 1, ONE)]
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(21, KV_HEADS * GROUPS, DIM, generator=generator).bfloat16()
    key, value = torch.randn(2, 21, KV_HEADS, DIM, generator=generator).bfloat16()
    reference, fast = ReferenceAttention(pool.clone()), CpuAttention(pool, budget_bytes=budget)
    reference.begin(spans)
    fast.begin(spans)
    exact = reference.attend(AttentionCall(0, query.float(), key, value, OPTIONS["plain"]))
    found = fast.attend(AttentionCall(0, query, key, value, OPTIONS["plain"]))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts a process's threads")
def test_the_thread_that_makes_it_gets_no_team_of_threads():
    """Beside a second team the threads of the engine's sleep at each region: 46 ms a token, not 28
    (docs/measurements, "Threads")."""
    tasks, counts = Path("/proc/self/task"), []
    pool = new_pool(torch.float32)

    def make():
        torch.set_num_threads(2)
        for _ in range(2):
            counts.append(len(list(tasks.iterdir())))
            attention = CpuAttention(pool)
        assert attention is not None

    before = torch.get_num_threads()
    with beside(make):
        pass
    torch.set_num_threads(before)
    assert counts[0] == counts[1]

"""Weights made of few bits are stored in these, and give the bits of oneDNN's products."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from torch import nn

from engine.models.packing import CannotNarrow, NarrowLinear, PackedLinear, Packing, PaddedLinear

pytestmark = pytest.mark.usefixtures("operators")

WIDTHS = ((32, 32), (576, 64), (1056, 96), (2080, 32))  # one chain of products, and several
START = 64  # bytes before the weights
KINDS = {  # bytes for 32 x 32
    "Q4_0": 640,
    "Q4_1": 768,
    "Q4_K": 768,
    "Q5_0": 768,
    "Q3_K": 768,
    "Q5_1": 896,
    "Q5_K": 896,
    "Q6_K": 1024,
    "Q8_0": 1152,
    "BF16": 2048,
}
# Where a block of 256 has its float16 numbers. A single one may be negative.
STEPS = {"Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def weight(kind: str, outputs: int, inputs: int) -> torch.Tensor:
    """[outputs, inputs] in float32, as they are read of a GGUF file."""
    random = np.random.default_rng(outputs * inputs)
    whole = -(-inputs // 256) * 256  # a file has whole blocks
    if kind in STEPS:
        stored = random_blocks(kind, outputs, whole, random)
    else:
        drawn = random.standard_normal((outputs, whole), dtype=np.float32) * np.float32(0.02)
        drawn[0, :32] = 0
        stored = gguf.quants.quantize(drawn, Quantization[kind])
    made = gguf.quants.dequantize(stored, Quantization[kind])
    return torch.from_numpy(made)[:, :inputs].contiguous()


def random_blocks(kind: str, outputs: int, inputs: int, random: np.random.Generator) -> np.ndarray:
    """Numbers and scales of all bits. `gguf` does not quantize to these."""
    _, size = gguf.GGML_QUANT_SIZES[Quantization[kind]]
    stored = random.integers(0, 256, (outputs, inputs // 256, size), dtype=np.uint8)
    for at in STEPS[kind]:
        steps = random.uniform(0.005, 0.01, (*stored.shape[:2], 1)).astype(np.float16)
        if len(STEPS[kind]) == 1:
            steps *= random.choice([-1, 1], steps.shape).astype(np.float16)
        stored[..., at : at + 2] = steps.view(np.uint8)
    return stored.reshape(outputs, -1)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether they are equal, with the signs of their zeros."""
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def layer(given: torch.Tensor, *, bias: bool = False) -> nn.Linear:
    linear = nn.Linear(given.shape[1], given.shape[0], bias=bias)
    linear.weight = nn.Parameter(given)
    return linear.requires_grad_(False)


def rows_of(count: int, width: int) -> torch.Tensor:
    return torch.randn(1, count, width, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_products_have_the_bits_of_packed_weights(kind, bias, threads):
    for inputs, outputs in WIDTHS:
        linear = layer(weight(kind, outputs, inputs), bias=bias)
        narrow, packed = Packing(narrow=True)(linear, alone=False), PackedLinear(linear)
        if not isinstance(narrow, NarrowLinear):
            pytest.skip("this oneDNN adds in an order of its own")
        assert narrow._packed.numel() == START + KINDS[kind] * outputs * inputs // 1024
        for count in (2, 3, 4, 5, 7, 13, 37, 97, 193, 200):
            rows = rows_of(count, inputs)
            expected = packed(rows)
            for num_threads in (1, 2, 3):
                threads(num_threads)
                assert torch.equal(narrow(rows), expected)
            assert torch.equal(narrow(rows[:, -1:]), expected[:, -1:]), "one row alone"


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_can_be_had_again(kind):
    given = weight(kind, 64, 96)
    narrow = NarrowLinear(layer(given))
    assert same_bits(narrow.weight, given) and narrow.weight is narrow.weight


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_of_a_weight_is_lost(kind):
    """One number is the next float32, or the other zero: such a weight is not stored so."""
    given = weight(kind, 64, 96)
    given[40, 70] = torch.nextafter(given[40, 70], torch.tensor(9.0))
    with pytest.raises(CannotNarrow):
        NarrowLinear(layer(given))
    assert type(Packing(narrow=True)(layer(given), alone=False)) is PackedLinear
    given = torch.full((32, 32), 1 + 2**-20)
    given[0, :2] = torch.tensor([0.0, -0.0])
    with pytest.raises(CannotNarrow):
        NarrowLinear(layer(given))


STEP, LEAST = 1217 * 2.0**-17 * 37, -1009 * 2.0**-13 * 63  # float16 numbers times 6 bits
SMALLEST = 3 * 2.0**-24  # a subnormal float16
EDGES = {  # step, numbers, least, bytes for 32 x 32
    "one number": (STEP, [5], LEAST, 640),
    "nothing but zeros": (0.0, [-3, 0, 7], 0.0, 640),
    "a negative step, and zeros": (-STEP, [-8, 0, 7], 0.0, 640),
    "one size": (STEP, [-8], 0.0, 640),
    "two numbers": (STEP, [3, 9], LEAST, 768),
    "no number is 0": (STEP, [4, 5, 7, 15], LEAST, 768),
    "no least": (STEP, [9, 10, 14, 15], 0.0, 768),
    "a negative step and a least": (-STEP, [0, 1, 4, 15], LEAST, 768),
    "far from zero": (STEP, [0, 3, 7, 14], -30 * 16 * STEP, 768),
    "a subnormal float16": (SMALLEST * 61, [0, 3, 8, 15], -SMALLEST * 7, 768),
    "five bits, no number is 0": (STEP, [3, 4, 11, 31], LEAST, 896),
    "six bits, negative": (-STEP, [-32, 0, 5, 31], 0.0, 1024),
    "one side of six bits": (STEP, [7, 12, 29, 31], 0.0, 896),
}


@pytest.mark.parametrize("edge", EDGES)
def test_groups_at_the_edges_are_stored_in_few_bits(edge):
    step, numbers, least, size = EDGES[edge]
    random = np.random.default_rng(3)
    drawn = random.choice(np.float32(numbers), (32, 32))
    drawn[:, : len(numbers)] = numbers
    made = np.float32(step) * drawn
    given = torch.from_numpy(made - np.float32(-least) if least else made)
    narrow = NarrowLinear(layer(given))
    assert same_bits(narrow.weight, given)
    assert narrow._packed.numel() == START + size


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e-45, -1e-40])
def test_numbers_that_no_step_makes_are_refused(number):
    given = weight("Q4_K", 32, 64)
    given[3, 40] = number
    with pytest.raises(CannotNarrow):
        NarrowLinear(layer(given))


def test_other_widths_and_weights_of_all_bits_are_packed_as_ever():
    packed = Packing(narrow=True)
    for outputs, inputs in ((48, 64), (64, 48)):
        given = torch.ones(outputs, inputs)
        assert type(packed(layer(given), alone=False)) is PackedLinear
    assert type(packed(layer(torch.randn(64, 64)), alone=False)) is PackedLinear
    assert type(packed(layer(torch.randn(64, 64)), alone=True)) is PaddedLinear
    assert type(packed(layer(torch.ones(64, 64)), alone=True)) is NarrowLinear
    assert type(Packing(narrow=False)(layer(torch.ones(64, 64)), alone=False)) is PackedLinear


def test_a_shape_whose_bits_differ_is_packed(monkeypatch):
    """Another oneDNN may add in another order."""
    own = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, rows: own(self, rows) + 1e-6)
    assert type(Packing(narrow=True)(layer(torch.ones(64, 64)), alone=False)) is PackedLinear


@pytest.mark.parametrize("chain", [256, 512, 2048, 2176])
def test_chains_of_another_length_are_found(chain, monkeypatch):
    """Another oneDNN, or processor, may end a chain of products elsewhere."""
    linear = layer(weight("BF16", 32, 2176))
    other = NarrowLinear(linear)
    other.chain = chain
    forward = NarrowLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, rows: forward(other, rows))
    found = Packing(narrow=True)(linear, alone=False)
    assert isinstance(found, NarrowLinear) and found.chain == chain
    exact = rows_of(9, 2176).double() @ linear.weight.double().T
    assert torch.allclose(found(rows_of(9, 2176)).double(), exact, atol=1e-3)


def test_rows_that_do_not_lie_together_are_multiplied(operators):
    linear = layer(weight("BF16", 32, 64))
    rows = rows_of(64, 8).transpose(1, 2)
    assert not rows.is_contiguous()
    assert torch.equal(NarrowLinear(linear)(rows), NarrowLinear(linear)(rows.contiguous()))
    assert NarrowLinear(linear)(torch.empty(1, 0, 64)).shape == (1, 0, 32)

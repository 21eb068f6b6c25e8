"""The kernels fit every generation of GPU, for every model's shape; compiled without any."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from cachesvc.vllm.kernel import move_slabs
from engine.attention.kernels import _merge_kernel, merge_constants
from engine.attention.tiling import tiling
from tests.kernels.compile import compiled
from tests.kernels.shapes import CAPABILITIES, SHARED, all_shapes

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")

MOST_SPILLED = 64  # bytes of registers


@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_shape_fits_in_shared_memory_and_registers(capability: int) -> None:
    too_large = {}
    for shape in all_shapes(capability):
        taken = shape.compiled(capability)
        if taken.shared > SHARED[capability] or taken.spilled > MOST_SPILLED:
            too_large[shape.name] = taken
    assert {} == too_large


@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", [75, 90])
def test_the_merging_kernel_fits(capability: int) -> None:
    for rows, dim in {(1, 64), (8, 128), (8, 256), (128, 512)}:
        chosen = merge_constants(8, rows, dim, sinks=rows == 8)
        taken = compiled(_merge_kernel, chosen, "fp16", capability)
        assert taken.shared <= SHARED[75] and taken.spilled <= MOST_SPILLED, (rows, dim, taken)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", [75, 90])
@pytest.mark.parametrize("gather", [False, True])
def test_the_kernel_under_vllm_fits(capability: int, gather: bool) -> None:
    taken = compiled(move_slabs, {"GATHER": gather, "TILE": 1024}, "fp16", capability)
    assert (0, 0) == (taken.shared, taken.spilled), taken


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (12, 0)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_any_number_of_heads_has_a_tiling(capability: tuple[int, int], itemsize: int) -> None:
    for dim in (1, 24, 64, 80, 128, 192, 256, 512, 576):
        for num_rows in (1, 7, 16, 71, 8 * 128):
            fit = tiling(num_rows, dim, itemsize, capability=capability)
            assert fit.rows >= 16 and fit.tile >= 16
            assert fit.rows & (fit.rows - 1) == 0 == fit.tile & (fit.tile - 1)

"""How much of a sequence a program of the attention kernel takes at once, so that it fits.

A program keeps its queries and its output in registers, and a few tiles of keys and values in
shared memory: 64 KiB on Turing (7.5), 99 KiB on 8.6, 8.9 and 12.0, more elsewhere. One choice fits
all from 8.0 on. `tests/kernels` compiles it for every shape of docs/models.md and every generation,
and holds shared memory and spilled registers to what is allowed.
"""

from dataclasses import dataclass

MIN_DOT = 16  # the fewest rows that `tl.dot` accepts
_TILE = 64  # keys at most
_LATENT_ROWS = 16  # over latents, 512 numbers wide
_LATENT_TILE_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class Tiling:
    """A program takes `rows` pairs of a query and a head, and `tile` keys at once."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def tiling(
    num_rows: int, dim: int, itemsize: int, *, capability: tuple[int, int], latent: bool = False
) -> Tiling:
    """The tiling for `num_rows` rows that share a head of `dim` numbers; `dim` of a latent is
    without its rotated key."""
    wide, old = padded(dim), capability < (8, 0)
    if latent and old:
        return Tiling(_LATENT_ROWS, MIN_DOT, 8, 1)
    if latent:
        tile = min(_TILE, max(MIN_DOT, _LATENT_TILE_BYTES // (wide * itemsize)))
        return Tiling(_LATENT_ROWS, tile, 4, 2 if itemsize == 2 else 1)
    most = 4096 if old else 8192  # numbers of the queries; the output takes as many registers
    rows = min(padded(num_rows), max(MIN_DOT, most // wide))
    tile = _TILE if itemsize == 2 and not old else _TILE // 2
    if wide > 256 or (itemsize == 4 and (old or wide > 128)):
        tile = MIN_DOT
    heavy = rows * wide > (2048 if old and itemsize == 2 else 4096)
    return Tiling(rows, tile, 8 if heavy else 4, 3)


def padded(count: int) -> int:
    """The next power of two that `tl.dot` accepts."""
    return max(MIN_DOT, 1 << (count - 1).bit_length())

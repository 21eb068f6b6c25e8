"""The tokens that grammars are matched against, as bit sets. Any thread, any process."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]  # [num_words], one bit per token


class Vocabulary:
    """`tokens[i]` holds the bytes of token i. Special tokens are empty: no grammar may produce
    them.

    `end` holds the ids that end an answer. `encode` is the tokenizer's, without special tokens. The
    process that matches does not need it.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        end: Sequence[int],
        encode: Callable[[str], Sequence[int]] = lambda text: (),
    ) -> None:
        self.tokens = list(tokens)
        self.end = sorted(end)
        self.encode = encode
        self.num_words = -(-len(self.tokens) // 32)
        self.end_mask = self.mask_of(self.end)
        self._lengths = np.array([len(token) for token in self.tokens], dtype=np.int32)
        first = np.array([token[0] if token else 256 for token in self.tokens], dtype=np.int32)
        self._begins = [self._pack(first == byte) for byte in range(257)]
        self._first = first
        self._longer: dict[int, Mask] = {}

    def mask_of(self, ids: Sequence[int]) -> Mask:
        """The bits of `ids`."""
        bits = np.zeros(len(self.tokens), dtype=np.bool_)
        bits[list(ids)] = True
        return self._pack(bits)

    def longer_than(self, num_bytes: int) -> Mask:
        """The tokens of more than `num_bytes` bytes."""
        if num_bytes not in self._longer:
            self._longer[num_bytes] = self._pack(self._lengths > num_bytes)
        return self._longer[num_bytes]

    def only_byte(self, allowed: Mask) -> int | None:
        """The byte with which every allowed token begins. None if they differ or the answer may
        end."""
        token = self.only_token(allowed, any_of=True)
        if token is None or not self.tokens[token]:
            return None
        byte = int(self._first[token])
        return None if (allowed & ~self._begins[byte]).any() else byte

    def only_token(self, allowed: Mask, *, any_of: bool = False) -> int | None:
        """The only allowed token, or the first with `any_of`. None if there is no such token."""
        words = np.flatnonzero(allowed)
        if len(words) == 0 or (len(words) > 1 and not any_of):
            return None
        word = int(allowed[words[0]]) & 0xFFFFFFFF
        lowest = word & -word
        if word != lowest and not any_of:
            return None
        return int(words[0]) * 32 + lowest.bit_length() - 1

    def _pack(self, bits: NDArray[np.bool_]) -> Mask:
        padded = np.zeros(self.num_words * 32, dtype=np.bool_)
        padded[: len(bits)] = bits
        return np.packbits(padded, bitorder="little").view(np.int32)

"""Content behind placeholder tokens, as digests that enter the block keys.

An image or a sound reaches the model as identical placeholder tokens, so tokens alone do not
determine their KV. Whoever computes the KV names the content. Two blocks are equal only if both
tokens and content are equal at the same position. Pure values, any thread.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAX_DIGEST_BYTES = 64  # as long as SHA-512's
MAX_CONTENTS = 1024  # of one prompt

# Rows of the block [first, end), row within the content, length of the content, length of the
# digest; the digest follows.
_PIECE = struct.Struct("<HHIIB")


@dataclass(frozen=True, slots=True)
class Content:
    """`length` tokens from `start` on represent the content with this `digest` of its bytes."""

    start: int
    length: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.start + self.length


def refusal(contents: Sequence[Content], num_tokens: int) -> tuple[int, str] | None:
    """The index of the first invalid content, and what is wrong with it. None if all are valid."""
    end = 0
    for number, content in enumerate(contents):
        if number == MAX_CONTENTS:
            return number, f"is one too many: a prompt may have {MAX_CONTENTS}"
        if content.start < end:
            return number, f"starts at token {content.start}, before the one ahead ends at {end}"
        end = content.end
        if content.length < 1 or end > num_tokens:
            return number, f"covers tokens {content.start} to {end} of a prompt of {num_tokens}"
        if not 1 <= len(content.digest) <= MAX_DIGEST_BYTES:
            return number, (
                f"has a digest of {len(content.digest)} bytes; 1 to {MAX_DIGEST_BYTES} are served"
            )
    return None


def block_contents(contents: Sequence[Content], block_size: int) -> list[bytes]:
    """The bytes that enter the key of each block, up to the last block with content.

    Empty for a block of text only. The bytes say which rows represent which part of which content,
    so equal bytes over equal tokens mean equal content in every row.
    """
    if not contents:
        return []
    blocks = [b""] * -(-contents[-1].end // block_size)
    for content in contents:
        for number in range(content.start // block_size, -(-content.end // block_size)):
            first = max(content.start, number * block_size)
            end = min(content.end, (number + 1) * block_size)
            blocks[number] += _PIECE.pack(
                first - number * block_size,
                end - number * block_size,
                first - content.start,
                content.length,
                len(content.digest),
            )
            blocks[number] += content.digest
    return blocks

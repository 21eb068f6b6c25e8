"""What keeps a request's blocks apart from others of its tenant: a salt, or an end user."""

import hashlib
from collections.abc import Sequence

from tiers.blocks.contents import Content


def contents_of(apart: Sequence[str]) -> tuple[Content, ...]:
    """The texts as a content of each prompt's first token; empty without any. So the blocks stay
    the tenant's own, for purges and quotas too."""
    return (Content(0, 1, _digest(apart)),) if apart else ()


def _digest(texts: Sequence[str]) -> bytes:
    """32 bytes over the texts, each with its length."""
    hasher = hashlib.blake2b(digest_size=32)
    for text in texts:
        data = text.encode()
        hasher.update(len(data).to_bytes(4, "little") + data)
    return hasher.digest()

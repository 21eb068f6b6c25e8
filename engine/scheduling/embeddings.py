"""Rows of images in a prompt: which of them a sequence must have before it is computed."""

from collections.abc import Sequence
from typing import Any, Protocol

from engine.batch import Embedded
from engine.request import Picture, Request, tile_of
from tiers.blocks.contents import Content


class Embeddings(Protocol):
    """See `engine.vision.encoder`. An owner is the id of a sequence."""

    def want(self, owner: int, share: str, pictures: Sequence[Picture]) -> bool: ...

    def rows(self, content: Content) -> Any: ...

    def drop(self, owner: int) -> None: ...


def unread(request: Request, start: int) -> list[Picture]:
    """The images of which tokens from `start` on stand for a part."""
    digests = {
        tile_of(content)[0]
        for content in request.contents
        if content.native and content.end > start
    }
    return [picture for picture in request.pictures if picture.digest in digests]


def embedded(
    request: Request, start: int, end: int, embeddings: Embeddings
) -> tuple[Embedded, ...]:
    """What takes the place of the tokens of `[start, end)` that stand for images."""
    found = []
    for content in request.contents:
        first, last = max(content.start, start), min(content.end, end)
        if content.native and first < last:
            rows = embeddings.rows(content)[first - content.start : last - content.start]
            found.append(Embedded(first - start, rows))
    return tuple(found)

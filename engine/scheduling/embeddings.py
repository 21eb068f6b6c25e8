"""The image rows of a prompt that a sequence needs before it is computed."""

from collections.abc import Sequence as Seq
from typing import Any, Protocol

from engine.batch import Embedded
from engine.request import Picture, Request, tile_of
from engine.scheduling.sequence import Sequence
from engine.scheduling.shares import owner_of
from tiers.blocks.contents import Content


class Embeddings(Protocol):
    """See `engine.vision.encoder`. An owner is the id of a sequence."""

    def want(self, owner: int, share: str, pictures: Seq[Picture]) -> bool: ...

    def rows(self, content: Content) -> Any: ...

    def drop(self, owner: int) -> None: ...


class PromptImages:
    """The images of sequences, by sequence id. Without `embeddings` the model sees none."""

    def __init__(self, embeddings: Embeddings | None) -> None:
        self._embeddings = embeddings

    def stand(self, sequence: Sequence) -> bool:
        """Whether all images are computed that the cache does not make unnecessary. Requests the
        missing ones."""
        if not sequence.request.pictures:
            return True
        assert self._embeddings is not None, "a request with images for a model without"
        # The last token is always computed.
        pictures = _unread(sequence.request, min(sequence.first_unread, sequence.num_prompt - 1))
        owner = owner_of(sequence.share)
        stand = self._embeddings.want(sequence.sequence_id, owner, pictures)
        sequence.awaits_images = not stand
        return stand

    def rows(self, sequence: Sequence, start: int, end: int) -> tuple[Embedded, ...]:
        """The rows that replace image placeholder tokens in `[start, end)`."""
        if self._embeddings is None or not sequence.request.pictures:
            return ()
        found = []
        for content in sequence.request.contents:
            first, last = max(content.start, start), min(content.end, end)
            if content.native and first < last:
                rows = self._embeddings.rows(content)
                rows = rows[first - content.start : last - content.start]
                found.append(Embedded(first - start, rows))
        return tuple(found)

    def drop(self, sequence: Sequence) -> None:
        """Release the sequence's images."""
        if self._embeddings is not None and sequence.request.pictures:
            self._embeddings.drop(sequence.sequence_id)


def _unread(request: Request, start: int) -> list[Picture]:
    """The images with placeholder tokens at `start` or later."""
    digests = {
        tile_of(content)[0]
        for content in request.contents
        if content.native and content.end > start
    }
    return [picture for picture in request.pictures if picture.digest in digests]

"""Images in a chat: which model takes them, and what each one becomes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from api.errors import InvalidRequest, Unsupported
from api.served_model import ServedModel
from engine.bounds import MAX_PICTURES
from engine.errors import InvalidImage
from engine.request import Picture
from engine.vision.sources import data_of


@dataclass(frozen=True, slots=True)
class ImageAsked:
    """An image that a message shows. `where` is the field that names it."""

    url: str
    where: str


def check_images(model: ServedModel, images: Sequence[ImageAsked]) -> None:
    """Raises Unsupported for a model that sees none, and for more than a prompt may have."""
    if not images:
        return
    if model.images is None:
        raise Unsupported(
            f"The model '{model.name}' sees no images; send text, or use a model that does.",
            param=images[0].where,
        )
    if len(images) > MAX_PICTURES:
        raise InvalidRequest(
            f"The chat has {len(images)} images; at most {MAX_PICTURES} are served.",
            param=images[MAX_PICTURES].where,
        )


def picture_of(model: ServedModel, asked: ImageAsked, folder: Path | None) -> Picture:
    """Reads and checks an image; not on the event loop. Raises InvalidRequest."""
    assert model.images is not None
    try:
        return model.images.read(data_of(asked.url, folder))
    except InvalidImage as error:
        raise InvalidRequest(f"The image {asked.where} {error}.", param=asked.where) from None

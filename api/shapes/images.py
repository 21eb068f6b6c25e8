"""Images in a chat: which models take them, and how one is read."""

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
    """An image in a message. `where` is the path of its field."""

    url: str
    where: str


def check_images(model: ServedModel, images: Sequence[ImageAsked]) -> None:
    """Raises Unsupported for a model without images, and for too many images in a prompt."""
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
    """Reads and checks an image. Blocks: not for the event loop. Raises InvalidRequest."""
    assert model.images is not None
    try:
        return model.images.read(data_of(asked.url, folder))
    except InvalidImage as error:
        raise InvalidRequest(f"The image {asked.where} {error}.", param=asked.where) from None

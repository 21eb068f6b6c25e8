"""Turns an image file into its part of a prompt: a digest, tiles, and the placeholders' text.

The rules are those of transformers' Idefics3 and SmolVLM processors. An image is cut into rows and
columns of square tiles. The whole image, scaled down, is the last tile. Each tile takes a fixed
number of image tokens in the prompt. Any thread.
"""

import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL
import torch
import transformers
from PIL import Image, ImageOps

from engine.bounds import MAX_PICTURE_BYTES
from engine.errors import InvalidImage
from engine.request import Picture
from tiers.blocks.contents import Content

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
MAX_PIXELS = 1 << 25  # 100 MB when decoded, whatever the size of the file
MAX_SIDE = 1 << 14  # 33,554,432 x 1 pixels take 2 GB and 7 s to scale down
MAX_TILES = 1 << 8  # per image
_KNOWN = 4096  # images whose size is remembered


@dataclass(frozen=True, slots=True)
class Marks:
    """The special tokens around and in place of an image, as text."""

    image: str = "<image>"
    around: str = "<fake_token_around_image>"
    whole: str = "<global-img>"


class PictureReader:
    """Reads images like one model's processor. `tile_tokens` is the number of tokens per tile."""

    def __init__(self, processor: Any, *, tile_tokens: int, image_token: int) -> None:
        """`processor` is transformers' image processor that uses Pillow."""
        self.marks = Marks()
        self.tile_tokens = tile_tokens
        self._image_token = image_token
        self._processor = processor
        # Everything that turns a file into pixels. Another scale or decoder gives another image.
        made_by = f"{processor.to_json_string()}\0{PIL.__version__}\0{transformers.__version__}"
        self._key = hashlib.blake2b(made_by.encode(), digest_size=32).digest()
        self._sizes: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def mark(self) -> str:
        """The mark of an image in a text before expansion."""
        return self.marks.image

    def read(self, data: bytes) -> Picture:
        """The picture of a file's bytes. Decodes it unless it is known. Raises InvalidImage."""
        digest = hashlib.blake2b(data, key=self._key, digest_size=32).digest()
        with self._lock:
            size = self._sizes.get(digest)
        if size is None:
            size = unpacked(data).size
        with self._lock:
            self._sizes[digest] = size
            self._sizes.move_to_end(digest)
            if len(self._sizes) > _KNOWN:
                self._sizes.popitem(last=False)
        width, height = size
        _, rows, columns = self._processor.get_number_of_image_patches(height, width, {})
        picture = Picture(digest, data, rows, columns)
        if picture.num_tiles > MAX_TILES:
            raise InvalidImage(f"makes {picture.num_tiles} tiles; at most {MAX_TILES} are served")
        return picture

    def file_of(self, image: bytes | Image.Image) -> bytes:
        """Encode an image as a file, without loss. Raises InvalidImage."""
        if isinstance(image, bytes):
            return image
        if not isinstance(image, Image.Image):
            raise InvalidImage(f"is {type(image).__name__}; give Pillow's, or the bytes of a file")
        file = io.BytesIO()
        upright = ImageOps.exif_transpose(image)
        (upright if upright.mode in _PNG_MODES else upright.convert("RGB")).save(file, "PNG")
        return file.getvalue()

    def expanded(self, text: str, pictures: Sequence[Picture]) -> str:
        """The text with each mark replaced by its image's placeholders. There must be as many marks
        as images."""
        parts = text.split(self.marks.image)
        assert len(parts) == len(pictures) + 1, (len(parts), len(pictures))
        shown = [self._shown(picture) for picture in pictures]
        return "".join(a + b for a, b in zip(parts, [*shown, ""], strict=True))

    def contents(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> tuple[Content, ...]:
        """The contents that tell which tokens stand for which tile. Raises InvalidImage if their
        number does not match the images' tiles."""
        places = np.flatnonzero(np.asarray(tokens, np.int32) == self._image_token)
        tiles = [(each, tile) for each in pictures for tile in range(each.num_tiles)]
        if len(places) != len(tiles) * self.tile_tokens:
            raise InvalidImage(
                f"the prompt has {len(places)} image tokens, and its images make "
                f"{len(tiles) * self.tile_tokens}"
            )
        starts = places[:: self.tile_tokens].tolist()
        return tuple(
            Content(start, self.tile_tokens, picture.tile_digest(tile), native=True)
            for start, (picture, tile) in zip(starts, tiles, strict=True)
        )

    def tiles(self, picture: Picture) -> torch.Tensor:
        """The pixels for the tower: [tiles, 3, side, side], float32."""
        made = self._processor(
            images=[unpacked(picture.data)], return_tensors="pt", return_row_col_info=True
        )
        found = made["rows"][0][0], made["cols"][0][0]
        assert found == (picture.rows, picture.columns), (found, picture.rows, picture.columns)
        pixels: torch.Tensor = made["pixel_values"][0]
        return pixels

    def _shown(self, picture: Picture) -> str:
        marks, image = self.marks, self.marks.image * self.tile_tokens
        whole = f"{marks.around}{marks.whole}{image}{marks.around}"
        if not picture.rows:
            return whole
        rows = (
            "".join(
                f"{marks.around}<row_{row + 1}_col_{column + 1}>{image}"
                for column in range(picture.columns)
            )
            for row in range(picture.rows)
        )
        return "".join(f"{row}\n" for row in rows) + "\n" + whole


def unpacked(data: bytes) -> Image.Image:
    """Decode a file's image, upright. Raises InvalidImage. If the header says that it is too large,
    it is not decoded."""
    if len(data) > MAX_PICTURE_BYTES:
        raise InvalidImage(f"has {len(data)} bytes; {MAX_PICTURE_BYTES} are served")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise InvalidImage(f"has {width} x {height} pixels; {MAX_PIXELS} in all are served")
        if max(width, height) > MAX_SIDE:
            raise InvalidImage(f"has {width} x {height} pixels; {MAX_SIDE} a side are served")
        image.load()
        return ImageOps.exif_transpose(image)
    except InvalidImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidImage(f"has more than {MAX_PIXELS} pixels") from error
    except Exception as error:  # Pillow's decoders may raise anything
        raise InvalidImage(
            f"cannot be read as one of {', '.join(FORMATS)} ({type(error).__name__})"
        ) from error

"""Image files as strangers send them: what is read, what is refused before it costs anything."""

import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from engine.bounds import MAX_PICTURE_BYTES
from engine.errors import InvalidImage, ModelError
from engine.models.load import load_model
from engine.request import Picture
from engine.vision import pictures
from engine.vision.encoder import MAX_HELD, PictureEncoder
from engine.vision.pictures import PictureReader, unpacked
from tests.support.models import IMAGE, save_tiny_vision_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_vision_model(folder)
    return folder


def reader_of(folder: Path, **changed: object) -> PictureReader:
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **changed)
    return PictureReader(processor, tile_tokens=4, image_token=IMAGE)


def file_of(size: tuple[int, int], kind: str = "PNG", mode: str = "RGB", **saved: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **saved)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cannot be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read"),
        (file_of((40, 40))[:-40], "cannot be read"),
        (file_of((4, 4), "BMP"), "PNG, JPEG, WEBP, GIF"),
        (file_of((6000, 6000), mode="1"), "6000 x 6000 pixels"),
        (file_of((20_000, 20_000), mode="1"), "pixels"),
        (file_of((16_385, 1), mode="1"), "16384 a side"),
        (file_of((1, 1 << 25), mode="1"), "16384 a side"),
        (bytes(MAX_PICTURE_BYTES + 1), "bytes"),
    ],
    ids=["empty", "svg", "cut", "bmp", "large", "bomb", "wide", "tall", "long"],
)
def test_what_is_no_image_or_too_much_of_one_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InvalidImage, match=said):
        unpacked(data)


def test_a_bomb_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of((6000, 6000), mode="1")
    assert len(data) < 10_000
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail("unpacked"))
    with pytest.raises(InvalidImage):
        unpacked(data)


def test_a_known_image_is_not_unpacked_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, data = reader_of(folder), file_of((50, 30))
    first = reader.read(data)
    monkeypatch.setattr(pictures, "unpacked", lambda data: pytest.fail("unpacked"))
    assert first == reader.read(data)
    assert (2, 2, 5) == (first.rows, first.columns, first.num_tiles)


def test_a_photograph_held_sideways_is_cut_as_it_is_seen(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter
    upright, turned = file_of((10, 64), "JPEG"), file_of((64, 10), "JPEG", exif=exif)
    reader = reader_of(folder)
    cut = [(p.rows, p.columns) for p in map(reader.read, (upright, turned))]
    assert [(2, 1)] * 2 == cut
    assert 3 == len(reader.tiles(reader.read(turned)))


def test_another_way_to_make_pixels_is_another_image(folder: Path) -> None:
    data = file_of((50, 30))
    changed = reader_of(folder, image_mean=[0.4, 0.5, 0.5])
    assert reader_of(folder).read(data).digest == reader_of(folder).read(data).digest
    assert reader_of(folder).read(data).digest != changed.read(data).digest


def test_a_model_whose_processor_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    save_tiny_vision_model(tmp_path)
    given = tmp_path / "preprocessor_config.json"
    given.write_text(given.read_text().replace('"longest_edge": 32', '"longest_edge": 16'))
    with pytest.raises(ModelError, match="tiles of 16"):
        load_model(str(tmp_path), device="cpu", dtype="float32", cache_dir=tmp_path)
    given.unlink()
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        load_model(str(tmp_path), device="cpu", dtype="float32", cache_dir=tmp_path)


# The tower's turns.


class SlowTower:
    """Computes a tile when it may."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.may = threading.Semaphore(0)
        self.reader = SimpleNamespace(tiles=lambda picture: torch.full((1, 1), picture.columns))

    def rows(self, tile: torch.Tensor) -> torch.Tensor:
        assert self.may.acquire(timeout=60)
        self.order.append(int(tile[0]))
        return tile[None]


@pytest.fixture
def tower() -> Iterator[SlowTower]:
    tower = SlowTower()
    yield tower
    tower.may.release(1000)  # nobody is left waiting


def picture(number: int) -> Picture:
    return Picture(number.to_bytes(32, "little"), b"", 1, number)


def until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def test_shares_take_turns_at_the_tower(tower: SlowTower) -> None:
    encoder = PictureEncoder(tower)  # type: ignore[arg-type]
    assert not encoder.want(1, "many", [picture(n) for n in (1, 2, 3)])
    assert not encoder.want(2, "one", [picture(9)])
    tower.may.release(4)
    until(lambda: encoder.want(2, "one", [picture(9)]) and len(tower.order) == 4)
    assert {1, 9} == {*tower.order[:2]}
    assert encoder.want(1, "many", [picture(n) for n in (1, 2, 3)])


def test_one_share_cannot_fill_the_tower(tower: SlowTower) -> None:
    encoder = PictureEncoder(tower)  # type: ignore[arg-type]
    for owner in range(MAX_HELD):
        encoder.want(owner, "many", [picture(owner)])
    assert MAX_HELD // 2 == len(encoder._entries)
    encoder.want(1000, "one", [picture(1000)])
    assert picture(1000).digest in encoder._entries


def test_images_that_nobody_waits_for_are_not_computed(tower: SlowTower) -> None:
    encoder = PictureEncoder(tower)  # type: ignore[arg-type]
    encoder.want(1, "a", [picture(1)])
    encoder.want(2, "a", [picture(2)])
    encoder.want(3, "a", [picture(2)])
    encoder.drop(1)
    encoder.drop(2)
    tower.may.release(5)
    until(lambda: encoder.want(3, "a", [picture(2)]))
    until(lambda: encoder._thread is None)
    assert 1 >= tower.order.count(1) and 1 == tower.order.count(2)
    encoder.drop(3)
    assert not encoder._entries


def test_a_closed_encoder_computes_no_further_tile(tower: SlowTower) -> None:
    encoder = PictureEncoder(tower)  # type: ignore[arg-type]
    encoder.want(1, "a", [picture(1), picture(2)])
    tower.may.release(5)
    encoder.close()
    assert encoder._thread is None and not encoder._entries
    assert 2 not in tower.order or len(tower.order) == 2

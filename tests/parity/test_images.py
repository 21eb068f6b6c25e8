"""Images answer as transformers answers, and their blocks are theirs alone, in every tier.

Tiny models of each family that sees, saved as users have them; transformers' own vision tower,
image processor and `generate` say what is right.
"""

import io
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from engine.batch import Batch
from engine.models.load import LoadedModel, load_model
from engine.request import Picture
from engine.vision.tower import FAMILIES
from tests.parity import architectures
from tests.parity.test_engine_tiers import BLOCK, NUM_OUT, House, from_every_tier
from tests.support.models import IMAGE, save_tiny_vision_model
from tiers.blocks.chain import Chain
from tiers.blocks.contents import Content, block_contents
from tiers.blocks.keys import CacheScope, PrefixKey

Prompt = tuple["array[int]", tuple[Content, ...], tuple[Picture, ...]]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / str(request.param)
    folder.mkdir()
    save_tiny_vision_model(folder, request.param)
    return folder


@pytest.fixture
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), device="cpu", dtype="float32", cache_dir=folder)


def drawing(seed: int, size: tuple[int, int] = (50, 40), kind: str = "PNG") -> bytes:
    """An image of random squares."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 255, (5, 4, 3), generator=generator, dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse.numpy()).resize(size, Image.Resampling.NEAREST).save(file, kind)
    return file.getvalue()


TEXT = "A prefix of text before an image, longer than a block. "


def chat_of(loaded: LoadedModel, num_images: int, text: str = TEXT) -> str:
    parts = [{"type": "text", "text": text}, *({"type": "image"} for _ in range(num_images))]
    parts.append({"type": "text", "text": " What is it?"})
    return loaded.tokenizer.render([{"role": "user", "content": parts}])


def prompt(loaded: LoadedModel, *files: bytes, text: str = TEXT) -> Prompt:
    """A chat that shows the images after the text, as the api makes it."""
    assert loaded.tower is not None
    reader = loaded.tower.reader
    shown = chat_of(loaded, len(files), text)
    pictures = tuple(reader.read(data) for data in files)
    tokens = loaded.tokenizer.encode(reader.expanded(shown, pictures), add_special_tokens=False)
    return tokens, reader.contents(tokens, pictures), pictures


def ask(house: House, *prompts: Prompt, **asked: Any) -> list[tuple[list[int], Any]]:
    tokens, contents, pictures = zip(*prompts, strict=True)
    return house.ask(tokens, contents=contents, pictures=pictures, **asked)


def root(house: House) -> PrefixKey:
    """That of a House's requests."""
    return CacheScope(layout=house.cache.layout.digest()).root()


def stock_tokens(folder: Path, tokens: "array[int]", files: tuple[bytes, ...]) -> list[int]:
    """transformers' own greedy tokens."""
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    images = [Image.open(io.BytesIO(data)) for data in files]
    shown = processor(images=[images], return_tensors="pt") if images else {}
    ids = torch.tensor([list(tokens)])
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=NUM_OUT,
        max_new_tokens=NUM_OUT,
        eos_token_id=None,
        **shown,
    )
    return made[0, len(tokens) :].tolist()


def test_tokens_are_those_of_transformers_cold_and_from_every_tier(
    folder: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    files = (drawing(1), drawing(2, (20, 60), "JPEG"))
    shown = prompt(loaded, *files)
    expected = stock_tokens(folder, shown[0], files)
    assert expected != stock_tokens(folder, shown[0], (drawing(3), files[1])), "it sees nothing"
    other, encoded = prompt(loaded, drawing(4)), list[int]()

    def together(house: House) -> None:
        plain = prompt(loaded, text="No image here, and more than a chunk of it. " * 3)
        [(again, _), (words, _), _] = ask(house, shown, plain, other)
        assert (expected, stock_tokens(folder, plain[0], ())) == (again, words)
        encoded.append(house.num_encoded)

    def asked(house: House, **how: Any) -> list[tuple[list[int], Any]]:
        told = ask(house, shown, **how)
        encoded.append(house.num_encoded)
        return told

    answers, hits = from_every_tier(lambda: House(loaded, tmp_path), asked, together)
    # Twice for the first two; never again, though asked five times more.
    num_tiles = sum(picture.num_tiles for picture in shown[2])
    twice = 2 * num_tiles
    assert [num_tiles, *[twice] * 4, twice + other[2][0].num_tiles, 0] == encoded
    assert [expected] * 6 == answers
    assert [0, 0] == hits[:2] and len(shown[0]) // BLOCK * BLOCK <= min(hits[2:]), hits
    page = architectures.PAGE.read_text(encoding="utf-8")
    assert architectures.seeing_row(folder.name, loaded) in page.splitlines()


def test_another_image_misses_from_its_first_block_on(loaded: LoadedModel, tmp_path: Path) -> None:
    one, other = prompt(loaded, drawing(1)), prompt(loaded, drawing(2))
    assert one[0] == other[0], "the tokens alone do not tell them apart"
    before = one[1][0].start // BLOCK * BLOCK
    assert before >= BLOCK
    with closing(House(loaded, tmp_path)) as house:
        [(_, cold)] = ask(house, one)
        [(seen, counts)] = ask(house, other)
        [(alone, _)] = ask(house, other, cache=False)
        named = tuple(Content(c.start, c.length, c.digest) for c in one[1])
        [(_, claimed)] = house.ask([one[0]], contents=[named])
    assert (0, before) == (cold.hit, counts.hit)
    assert alone == seen
    assert before == claimed.hit, "a client named the server's own digest"


def test_two_at_once_share_the_tower_and_leave_nothing(loaded: LoadedModel, tmp_path: Path) -> None:
    shown = prompt(loaded, drawing(1))
    with closing(House(loaded, tmp_path)) as house:
        [(first, _), (second, _)] = ask(house, shown, shown)
        assert shown[2][0].num_tiles == house.num_encoded
        assert house.encoder is not None
        assert {} == house.encoder._entries, "rows are kept beyond their use"
    assert first == second


def test_a_hit_that_ends_within_an_image_computes_the_image_again(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    """And no other one: the image before it is cached."""
    shown = prompt(loaded, drawing(1), drawing(2))
    middle = shown[1][7].start // BLOCK  # within the second image
    with closing(House(loaded, tmp_path)) as house:
        [(cold, _)] = ask(house, shown)
        chain = Chain(root(house), shown[0], BLOCK, block_contents(shown[1], BLOCK))
        house.engine.call(lambda cache: cache.evict(chain.keys[middle:])).result(60)
        before = house.num_encoded
        [(again, counts)] = ask(house, shown)
        assert shown[2][1].num_tiles == house.num_encoded - before
    assert cold == again
    assert middle * BLOCK == counts.hit


def test_a_preempted_answer_computes_its_image_again_where_its_blocks_have_gone(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = prompt(loaded, drawing(1))
    house = House(loaded, tmp_path)
    scheduler = house.engine._scheduler
    schedule = scheduler.schedule

    def interrupted() -> Batch:
        for sequence in [*scheduler.running]:
            if sequence.num_generated == 3 and not scheduler.num_preemptions:
                scheduler._preempt(sequence)
                house.cache.operations.evict(sequence.chain.keys)
        return schedule()

    try:
        [(expected, _)] = ask(house, shown, cache=False)
        before = house.num_encoded
        monkeypatch.setattr(scheduler, "schedule", interrupted)
        [(answer, counts)] = ask(house, shown)
        assert 1 == scheduler.num_preemptions
        assert 2 * shown[2][0].num_tiles == house.num_encoded - before
    finally:
        house.close()
    assert expected == answer
    assert (0, len(shown[0])) == (counts.hit, counts.prompt)


def test_what_the_tower_cannot_compute_fails_its_request_alone(
    loaded: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the next one of that image is tried again."""
    shown, plain = prompt(loaded, drawing(1)), prompt(loaded)
    assert loaded.tower is not None
    with closing(House(loaded, tmp_path)) as house:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loaded.tower, "rows", lambda tile: 1 / 0)
            with pytest.raises(AssertionError, match="an image could not be computed"):
                ask(house, shown)
            assert house.engine.failure is None
            ask(house, plain)
        [(answer, _)] = ask(house, shown)
    assert NUM_OUT == len(answer)
    assert "an image cannot be computed" in caplog.text


def test_two_images_of_one_prompt_are_in_their_places(
    folder: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    files = (drawing(5), drawing(6), drawing(5))
    shown = prompt(loaded, *files)
    assert 3 * 5 * 4 == shown[0].count(IMAGE)
    with closing(House(loaded, tmp_path, step_tokens=32)) as house:
        [(answer, _)] = ask(house, shown)
    assert stock_tokens(folder, shown[0], files) == answer


def test_the_prompt_is_that_of_transformers_processor(folder: Path, loaded: LoadedModel) -> None:
    from transformers import Idefics3Processor

    processor = Idefics3Processor(
        AutoImageProcessor.from_pretrained(folder, backend="pil"),
        AutoTokenizer.from_pretrained(folder),
        image_seq_len=4,
    )
    sizes = [(50, 40), (20, 60), (1, 300), (300, 1), (8, 8), (64, 32)]
    files = [drawing(n, size) for n, size in enumerate(sizes)]
    tokens, _, _ = prompt(loaded, *files)
    images = [Image.open(io.BytesIO(data)) for data in files]
    expected = processor(
        text=chat_of(loaded, len(files)), images=[images], add_special_tokens=False
    )["input_ids"][0]
    assert list(tokens) == expected

"""Reads prompts given to `LLM`: texts, token ids, vLLM's dictionaries, and chats, with images."""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import InvalidImage, InvalidParameter
from engine.models.load import LoadedModel
from engine.request import Picture
from engine.vision.sources import data_of
from tiers.blocks.contents import Content

PromptDict = Mapping[str, Any]  # {"prompt": text} or {"prompt_token_ids": ids}, as in vLLM
Message = Mapping[str, Any]

_NAMES = ("prompt", "prompt_token_ids", "multi_modal_data")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens, with the text they came from, and the images that some of them stand for."""

    text: str | None
    tokens: "array[int]"
    contents: tuple[Content, ...] = ()
    pictures: tuple[Picture, ...] = ()


class PromptReader:
    """Reads prompts for one model. All methods raise InvalidParameter, which names the bad
    prompt."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def prompts(self, given: Any) -> list[Prompt]:
        if isinstance(given, str | Mapping):
            given = [given]
        if not isinstance(given, Seq):
            raise _bad_prompt("prompts", given)
        return [self._prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(given)]

    def chat(
        self, messages: Seq[Message], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> Prompt:
        """A conversation under the model's chat template. Its `image_url` parts may name any file
        that the program can read."""
        plain, images = [], []
        for number, message in enumerate(messages):
            shown, found = _without_images(message, f"messages[{number}]")
            plain.append(shown)
            images += found
        tokenizer = self._loaded.tokenizer
        text = tokenizer.render(
            plain,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if images:
            return self._seen(text, images, "messages", add_special_tokens=False)
        return Prompt(text, tokenizer.encode(text, add_special_tokens=False))

    def _prompt(self, given: Any, name: str) -> Prompt:
        if isinstance(given, Mapping):
            text, ids, images = _of_dictionary(given, name)
            if images and text is not None and ids is None:
                return self._seen(text, images, name)
            if images:
                raise InvalidParameter(
                    f"{name} has images; give its prompt as text, with a mark for each", param=name
                )
            if ids is not None:
                return Prompt(text, self._prompt(ids, name).tokens)
            given = text
        if isinstance(given, str):
            return Prompt(given, self._loaded.tokenizer.encode(given))
        if not isinstance(given, Seq | array) or isinstance(given, bytes):
            raise _bad_prompt(name, given)
        size = self._loaded.vocab_size
        for token in given:
            if not isinstance(token, int) or not 0 <= token < size:
                raise InvalidParameter(
                    f"{name} holds {token!r}, and a token id is an integer below {size}",
                    param=name,
                )
        return Prompt(None, array("i", given))

    def _seen(
        self, text: str, images: Seq[Any], name: str, *, add_special_tokens: bool = True
    ) -> Prompt:
        """A text with images in place of the model's image marks."""
        tower = self._loaded.tower
        if tower is None:
            raise InvalidParameter(f"{name} has images, and this model sees none", param=name)
        reader = tower.reader
        if text.count(reader.mark) != len(images):
            raise InvalidParameter(
                f"{name} has {len(images)} images and {text.count(reader.mark)} marks for one, "
                f"{reader.mark}",
                param=name,
            )
        try:
            pictures = tuple(reader.read(reader.file_of(image)) for image in images)
            tokens = self._loaded.tokenizer.encode(
                reader.expanded(text, pictures), add_special_tokens=add_special_tokens
            )
            return Prompt(text, tokens, reader.contents(tokens, pictures), pictures)
        except InvalidImage as error:
            raise InvalidParameter(f"an image of {name} {error}", param=name) from None


def _without_images(message: Any, name: str) -> tuple[Any, list[bytes]]:
    """The message in the form that templates read, and the files of its images."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, Seq) or isinstance(content, str):
        return message, []
    parts: list[Any] = []
    images = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "image_url":
            parts.append(part)
            continue
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        try:
            images.append(data_of(str(url), Path("/")))
        except InvalidImage as error:
            where = f"{name}.content[{number}]"
            raise InvalidParameter(f"the image {where} {error}", param=where) from None
        parts.append({"type": "image"})
    return {**message, "content": parts}, images


def _of_dictionary(given: PromptDict, name: str) -> tuple[str | None, Any, list[Any]]:
    """The text, the token ids and the images of a prompt dictionary in vLLM's form. If it has both
    text and ids, the ids are used."""
    others = sorted(other for other in given.keys() - {*_NAMES} if given[other] is not None)
    if others:
        raise InvalidParameter(
            f"{name} has {', '.join(others)}; a prompt dictionary has {', '.join(_NAMES)}",
            param=name,
        )
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    if text is None and ids is None:
        raise InvalidParameter(f"{name} has neither prompt nor prompt_token_ids", param=name)
    if text is not None and not isinstance(text, str):
        raise _bad_prompt(f"{name}['prompt']", text)
    if isinstance(ids, str):
        raise _bad_prompt(f"{name}['prompt_token_ids']", ids)
    return text, ids, _images_of(given.get("multi_modal_data") or {}, name)


def _images_of(data: Any, name: str) -> list[Any]:
    if not isinstance(data, Mapping) or data.keys() - {"image"}:
        raise InvalidParameter(
            f"{name}['multi_modal_data'] must be a dictionary with image alone: an image of "
            f"Pillow, the bytes of a file, or a list of these",
            param=name,
        )
    images = data.get("image")
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def _bad_prompt(name: str, given: Any) -> InvalidParameter:
    return InvalidParameter(
        f"{name} is {type(given).__name__}; prompts are a string, a list of strings, a list of "
        f"lists of token ids, or dictionaries with prompt or prompt_token_ids",
        param=name,
    )

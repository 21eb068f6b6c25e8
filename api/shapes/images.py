"""The refusal of images, and of all else that is no text, by an engine that takes token ids."""

from api.errors import Unsupported

_IMAGES = frozenset({"image", "image_url", "input_image"})


def text_only(kind: object, where: str) -> Unsupported:
    """What a part or block of this type is answered with, at the path `where` of a body."""
    advice = "send what it says as text"
    if kind in _IMAGES:
        advice = "serve a model that reads images with an engine at a URL (docs/vllm.md)"
    return Unsupported(
        f"{where} is of type {str(kind)[:40]!r}; this model reads text only. To use it, {advice}.",
        param=where,
    )

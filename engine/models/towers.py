"""Models that transformers defines only together with images, and whose text is served."""

import logging
from typing import Any

from engine.errors import ModelError

logger = logging.getLogger(__name__)

TEXT_OF = frozenset(
    {
        *("cohere2_vision", "exaone4_5", "glm46v", "glm4v", "glm4v_moe", "idefics3", "internvl"),
        *("kimi_k25", "lfm2_vl", "minicpmv4_7", "mistral3", "qwen2_5_vl", "qwen2_vl"),
        *("qwen3_vl", "qwen3_vl_moe", "smolvlm", "step3p7"),
    }
)


def is_text_of(config: Any) -> bool:
    return getattr(config, "model_type", None) in TEXT_OF


def drop_towers(model: Any) -> None:
    """Leave nothing but the text of transformers' model of images and text. Its forward takes token
    ids as ever. Raises ModelError if it has no text model of its own."""
    text, inner = model.get_decoder(), model.base_model
    if text is None or text is inner or all(child is not text for child in inner.children()):
        raise ModelError(f"{type(model).__name__} has no text model beside its images")
    for name, child in list(inner.named_children()):
        if child is not text:
            setattr(inner, name, None)
    logger.info(f"of {model.config.model_type} the text is served, and no images")

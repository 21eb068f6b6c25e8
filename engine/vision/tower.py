"""A model's own vision tower: turns the pixels of tiles into rows of image tokens."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from engine.errors import ModelError

if TYPE_CHECKING:
    from engine.vision.pictures import PictureReader  # imports Pillow, an extra

logger = logging.getLogger(__name__)

FAMILIES = frozenset({"idefics3", "smolvlm"})  # model types whose images are served
# Types that transformers defines only together with images, and whose text is served.
TEXT_OF = frozenset(
    {
        *("cohere2_vision", "exaone4_5", "glm46v", "glm4v", "glm4v_moe", "internvl"),
        *("kimi_k25", "lfm2_vl", "minicpmv4_7", "mistral3", "qwen2_5_vl", "qwen2_vl"),
        *("qwen3_vl", "qwen3_vl_moe", "step3p7"),
    }
)


class VisionTower:
    """Computes one tile at a time, so that its rows do not depend on other tiles."""

    def __init__(self, model: Any, reader: "PictureReader") -> None:
        """`model` is transformers' model of tower, connector and text."""
        self.reader = reader
        self._model = model

    @torch.inference_mode()
    def rows(self, tile: torch.Tensor) -> torch.Tensor:
        """tile: [3, side, side]; returns [tile tokens, hidden] on the model's device."""
        pixels = tile[None, None].to(self._model.device)
        found = self._model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
        rows = torch.cat(list(found)) if isinstance(found, list | tuple) else found
        rows = rows.reshape(-1, rows.shape[-1])
        if len(rows) != self.reader.tile_tokens or not torch.isfinite(rows).all():
            raise ModelError(
                f"the vision tower gave {len(rows)} rows for {self.reader.tile_tokens} image "
                f"tokens, or numbers that are not finite"
            )
        return rows


def has_vision(config: Any) -> bool:
    return getattr(config, "model_type", None) in FAMILIES


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


def split(model: Any) -> Any:
    """The text model of transformers' image-text model, as a causal LM of its own type with the
    same weights."""
    config = model.config.get_text_config()
    with torch.device("meta"):
        text: Any = AutoModelForCausalLM.from_config(config)
    text.config = config
    setattr(text, text.base_model_prefix, model.model.text_model)
    text.set_output_embeddings(model.get_output_embeddings())
    text.generation_config = model.generation_config
    if any(parameter.is_meta for parameter in text.parameters()):
        raise ModelError(f"{type(model).__name__} has more to its text than layers and a head")
    return text.eval()


def tower_of(model: Any, folder: Path) -> VisionTower:
    """The tower of a model loaded from `folder`. Raises ModelError."""
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    except Exception as error:  # transformers' errors have no common root
        raise ModelError(f"{folder} holds no usable preprocessor_config.json: {error}") from error
    return build(model, processor)


def build(model: Any, processor: Any) -> VisionTower:
    """Build the tower. Raises ModelError if tower, processor and config do not match."""
    try:
        from engine.vision.pictures import PictureReader
    except ImportError as error:
        raise ModelError("images need Pillow: pip install 'cachesvc[vision]'") from error
    config, inner = model.config, model.model
    reader = PictureReader(
        processor, tile_tokens=inner.image_seq_len, image_token=config.image_token_id
    )
    tower = VisionTower(inner, reader)
    side = processor.max_image_size["longest_edge"]
    if not isinstance(side, int) or side != config.vision_config.image_size:
        raise ModelError(
            f"the image processor makes tiles of {side} and the vision tower takes "
            f"{config.vision_config.image_size}"
        )
    try:
        tower.rows(torch.ones(3, side, side))
    except (RuntimeError, ValueError, TypeError) as error:
        raise ModelError(f"the vision tower cannot be run: {error}") from error
    return tower

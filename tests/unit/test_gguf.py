"""A GGUF file becomes a folder of safetensors with the same numbers, or is refused by name."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.errors import ModelError
from engine.models.describe import describe_folder
from engine.models.files import check, digest_of, find
from engine.models.gguf import convert, convert_again
from engine.models.gguf_config import ARCHITECTURES
from engine.models.load import load_model
from tests.support.gguf_files import fields_of, stock, tensors_of, write_gguf

Fields = dict[str, Any]
Tensors = dict[str, np.ndarray]


def tiny(kind: str = "llama") -> tuple[Fields, Tensors]:
    model = stock(kind)
    return fields_of(kind, model), tensors_of(kind, model)


def write_tiny(path: Path, kind: str = "llama") -> Tensors:
    fields, tensors = tiny(kind)
    write_gguf(path, kind, fields, tensors)
    return tensors


def refused_as(folder: Path, kind: str, fields: Fields, tensors: Tensors) -> str:
    return refusal(write_gguf(folder / "m.gguf", kind, fields, tensors))


def refusal(path: Path) -> str:
    """Why the model is refused. Nothing is left of its conversion."""
    left = path.parent / "cache"
    with pytest.raises(ModelError) as refused:
        find(str(path), left, lambda *_: None)
    assert not left.exists() or [] == list(left.iterdir())
    said = str(refused.value)
    assert "\n" not in said and len(said) < 600, said
    return said


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_is_unknown_is_refused_by_name(kind, tmp_path):
    fields, tensors = tiny(kind)
    for name in (f"{kind}.unheard_of", "unheard.of", "general.unheard_of", "tokenizer.unheard_of"):
        said = refused_as(tmp_path, kind, {**fields, name: 1}, tensors)
        assert f"1 field not served for {kind}: {name};" in said
    for name in ("blk.1.unheard_of.weight", "unheard_of", "rope_freqs.bias"):
        said = refused_as(tmp_path, kind, fields, {**tensors, name: np.ones(4, np.float32)})
        assert f"1 tensor not served for {kind}: {name};" in said


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_each_tensor_and_field_that_is_needed_is_missed(kind, tmp_path):
    fields, tensors = tiny(kind)
    for name in tensors:
        if name == "output.weight" or name.startswith("blk.0") or "bias" in name:
            continue  # a head that is tied; the same names as of the other layers
        rest = {each: value for each, value in tensors.items() if each != name}
        assert f"lacks the tensor {name}; fetch" in refused_as(tmp_path, kind, fields, rest)
    for name in ARCHITECTURES[kind].keys:
        rest = {each: value for each, value in fields.items() if each != f"{kind}.{name}"}
        assert f"lacks the field {kind}.{name}" in refused_as(tmp_path, kind, rest, tensors)


BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("llama.attention.scale", 0.5, "attention.scale"),
    ("llama.logit_scale", 0.25, "logit_scale"),
    ("llama.residual_scale", 0.25, "residual_scale"),
    ("llama.attention.causal", False, "attention.causal"),
    ("llama.attention.head_count_kv", 4, "in the shape"),
    ("llama.attention.value_length", 32, "attention.value_length"),
    ("llama.attention.head_count", 0, "has 0 in the field llama.attention.head_count"),
    ("llama.attention.head_count", "four", "of another kind"),
    ("llama.attention.layer_norm_rms_epsilon", float("nan"), "has nan in the field"),
    ("llama.block_count", 3, "has tensors of 2 layers, and says 3"),
    ("llama.block_count", 1, "has tensors of 2 layers, and says 1"),
    ("llama.rope.dimension_count", 8, "rope.dimension_count"),
    ("llama.rope.dimension_sections", [8, 8], "llama.rope.dimension_sections"),
    ("llama.rope.scaling.type", "ntk", "rope.scaling.type ntk"),
    ("llama.rope.scaling.type", "longrope", "lacks the tensor rope_factors_long.weight"),
    ("llama.rope.scaling.factor", 0.5, "rope.scaling.factor"),
    ("llama.rope.scaling.attn_factor", 2.0, "rope.scaling.attn_factor"),
    ("llama.rope.scaling.yarn_ext_factor", 0.5, "rope.scaling.yarn_ext_factor"),
    ("llama.vocab_size", 300, "lists 258 tokens, which is not its vocab_size"),
    ("general.architecture", "mpt", "is of architecture mpt; served from GGUF are gemma, "),
    ("general.type", "adapter", "is of type adapter"),
    ("tokenizer.ggml.add_eos_token", True, "tokenizer.ggml.add_eos_token"),
    ("tokenizer.ggml.add_bos_token", True, "lacks the field tokenizer.ggml.bos_token_id"),
    ("tokenizer.ggml.eos_token_id", 258, "eos_token_id is none of them"),
    ("tokenizer.ggml.merges", ["nonsense"], "has no usable tokenizer"),
    ("tokenizer.ggml.token_type", [1, 1], "another number in tokenizer.ggml.token_type"),
    ("tokenizer.ggml.tokens", None, "lacks the field tokenizer.ggml.tokens"),
    ("tokenizer.ggml.model", None, "lacks the field tokenizer.ggml.model"),
    ("tokenizer.ggml.eos_token_id", None, "lacks the field tokenizer.ggml.eos_token_id"),
    ("split.count", 2, "says that it is file 1 of 2 of its model"),
]


@pytest.mark.parametrize(("name", "value", "said"), BAD_FIELDS)
def test_a_field_that_cannot_be_served_is_refused_by_name(name, value, said, tmp_path):
    fields, tensors = tiny()
    given = {each: old for each, old in {**fields, name: value}.items() if old is not None}
    kind = given.pop("general.architecture", "llama")
    assert said in refused_as(tmp_path, kind, given, tensors)


def changed(name: str, value: np.ndarray | None) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        return {n: t for n, t in {**tensors, name: value}.items() if t is not None}

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed("blk.0.ffn_down.weight", np.ones((64, 64), np.float32)), "in the shape [64, 64]"),
        (changed("blk.0.attn_q.weight", np.ones((9, 9), np.float32)), "in the shape [9, 9]"),
        (changed("blk.0.ffn_up.weight", np.ones((96, 64), np.int32)), "ffn_up.weight in I32"),
        (changed("blk.0.attn_q.bias", np.ones(64, np.float32)), "lacks the tensor blk.0.attn_k.bi"),
        (changed("blk.7.attn_q.bias", np.ones(64, np.float32)), "tensors of 8 layers, and says 2"),
        (changed("blk.1.attn_v.bias", np.ones(32, np.float32)), "blk.1.attn_v.bias"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(change, said, tmp_path):
    fields, tensors = tiny()
    assert said in refused_as(tmp_path, "llama", fields, change(tensors))


@pytest.mark.parametrize("left", [0, 3, 20, 200, 5000, 0.5, 0.999])
def test_a_torn_file_is_refused(left, tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny(path)
    size = path.stat().st_size
    with path.open("rb+") as file:
        file.truncate(int(left if left >= 1 or not left else left * size))
    assert f"{path} is not a readable GGUF file, or not all of one" in refusal(path)


def write_split(folder: Path, fields: Fields, tensors: Tensors) -> list[Path]:
    names = list(tensors)
    parts = []
    for number, mine in enumerate((names[::2], names[1::2])):
        path = folder / f"m-{number + 1:05}-of-00002.gguf"
        given = {name: tensors[name] for name in mine}
        part = (number, 2, len(names))
        parts.append(write_gguf(path, "llama", fields if number == 0 else {}, given, part))
    return parts


def test_a_split_model_is_read_whole_or_refused(tmp_path):
    (tmp_path / "split").mkdir()
    fields, tensors = tiny()
    parts = write_split(tmp_path / "split", fields, tensors)
    write_gguf(tmp_path / "m.gguf", "llama", fields, tensors)
    whole = find(str(tmp_path / "m.gguf"), tmp_path, lambda *_: None)
    for name in (*parts, tmp_path / "split"):
        folder = find(str(name), tmp_path, lambda *_: None)
        assert (digest_of(folder), folder != whole) == (digest_of(whole), True)
    for part, said in ((parts[0], "-00001-of-00002"), (parts[1], "-00002-of-00002")):
        kept = part.rename(tmp_path / "kept")
        for name in (parts[0], parts[1], tmp_path / "split"):
            if name.exists():
                with pytest.raises(ModelError, match=f"one of 2 files .*{said}.gguf is not beside"):
                    check(str(name), {})
        kept.rename(part)
    parts[0].rename(tmp_path / "alone.gguf")
    assert "says that it is file 1 of 2" in refusal(tmp_path / "alone.gguf")


def test_files_that_are_not_of_one_model_are_refused(tmp_path):
    fields, tensors = tiny()
    first, second = write_split(tmp_path, fields, tensors)
    name = next(iter(tensors))
    again = {name: tensors[name]}
    write_gguf(second, "llama", {}, again, (1, 2, len(tensors)))
    assert f"has the tensor {name} again" in refusal(first)
    write_gguf(second, "llama", {}, {}, (1, 2, len(tensors)))
    assert f"tensors, and says {len(tensors)}" in refusal(first)
    write_gguf(second, "llama", {"llama.block_count": 3}, {}, (1, 2, len(tensors)))
    assert "differ in llama.block_count" in refusal(first)


def test_the_digest_is_of_the_weights_as_served(tmp_path):
    path = tmp_path / "m.gguf"
    fields, tensors = tiny()
    write_gguf(path, "llama", fields, tensors)
    folder, again = (find(str(path), tmp_path / name, lambda *_: None) for name in "ab")
    first = digest_of(folder)
    assert first == digest_of(again)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert first != digest_of(folder)
    stretched = {**fields, "llama.rope.scaling.factor": 2.0}
    write_gguf(path, "llama", stretched, tensors)
    assert first != digest_of(find(str(path), tmp_path / "a", lambda *_: None))


def test_each_end_of_an_answer_and_each_template_is_kept(tmp_path):
    fields, tensors = tiny()
    more = {
        "tokenizer.ggml.eot_token_id": 65,
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "with tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    write_gguf(tmp_path / "m.gguf", "llama", {**fields, **more}, tensors)
    loaded = load_model(str(tmp_path / "m.gguf"), device="cpu", dtype="auto", cache_dir=tmp_path)
    assert loaded.eos_token_ids == {256, 65}
    assert "plain" == loaded.tokenizer.chat_template


def test_of_a_model_whose_engine_is_elsewhere_the_text_alone_is_converted(tmp_path):
    write_tiny(tmp_path / "tiny.gguf")
    whole = describe_folder(str(tmp_path / "tiny.gguf"), tmp_path / "a")
    text = describe_folder(str(tmp_path / "tiny.gguf"), tmp_path / "b", text_alone=True)
    assert [[True], [False]] == [
        [(each.folder / "model.safetensors").exists()] for each in (whole, text)
    ]
    assert whole.tokenizer.digest == text.tokenizer.digest
    assert (whole.vocab_size, whole.eos_token_ids) == (text.vocab_size, text.eos_token_ids)
    again = describe_folder(str(tmp_path / "tiny.gguf"), tmp_path / "a", text_alone=True)
    assert whole.folder == again.folder, "what is there is used"


def test_a_disk_without_room_for_the_converted_model_is_said(tmp_path):
    """A limit of this process takes the place of a full disk."""
    write_tiny(tmp_path / "tiny.gguf")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(ModelError, match="MiB in float32, cannot be written to"):
            convert([tmp_path / "tiny.gguf"], tmp_path / "out", lambda *_: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [tmp_path / "tiny.gguf"] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "left"),
    [
        ("model.safetensors", 5000),
        ("model.safetensors", 0),
        ("tokenizer.json", 9),
        ("config.json", 9),
    ],
)
def test_a_damaged_converted_model_names_the_folder_to_remove(tmp_path, file, left):
    write_tiny(tmp_path / "tiny.gguf")
    folder = find(str(tmp_path / "tiny.gguf"), tmp_path, lambda *_: None)
    with (folder / file).open("rb+") as written:
        written.truncate(left)
    with pytest.raises(ModelError, match=f"; remove the folder {folder}, and the next start"):
        load_model(str(tmp_path / "tiny.gguf"), device="cpu", dtype="auto", cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["gguf-mine", "gguf-v3-mine", "gguf-v2-0a"])
def test_nobody_is_told_to_remove_a_folder_of_their_own(name):
    assert "" == convert_again(Path(name))

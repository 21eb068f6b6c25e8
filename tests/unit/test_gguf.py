"""A GGUF file becomes a folder of safetensors with the same numbers, and is read once for it."""

import resource
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.errors import ModelError
from engine.models.files import find
from engine.models.gguf import convert, convert_again
from engine.models.load import load_model

WIDTH, WIDE, HEADS, KV_HEADS = 32, 64, 4, 2
SHAPES = {
    "attn_norm": (WIDTH,),
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH * KV_HEADS // HEADS, WIDTH),
    "attn_v": (WIDTH * KV_HEADS // HEADS, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_norm": (WIDTH,),
    "ffn_gate": (WIDE, WIDTH),
    "ffn_up": (WIDE, WIDTH),
    "ffn_down": (WIDTH, WIDE),
}


def tokens() -> list[str]:
    """The 256 bytes as byte-level BPE writes them, a merge, and what ends an answer."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [256 + n for n in range(256 - len(shown))]
    return [chr(n) for n in [*shown, *others]] + ["ab", "<|im_end|>"]


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A Llama of one layer; returns its tensors by their GGUF names."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens())
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    rng = np.random.default_rng(0)
    shapes = {f"blk.0.{name}": shape for name, shape in SHAPES.items()}
    shapes |= {"token_embd": (len(tokens()), WIDTH), "output_norm": (WIDTH,)}
    tensors = {
        f"{name}.weight": rng.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_file_is_read_once_and_its_weights_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = write_gguf(tmp_path / "tiny.gguf")
    opened, tables = [], []
    open_file, name_tensors = gguf.GGUFReader.__init__, gguf.get_tensor_name_map
    monkeypatch.setattr(
        gguf.GGUFReader,
        "__init__",
        lambda reader, path, *rest: (opened.append(path), open_file(reader, path, *rest))[1],
    )
    monkeypatch.setattr(
        gguf, "get_tensor_name_map", lambda *about: (tables.append(about), name_tensors(*about))[1]
    )
    make_reader, make_names = gguf.GGUFReader, gguf.get_tensor_name_map
    shares: list[float] = []
    convert(tmp_path / "tiny.gguf", tmp_path / "out", lambda what, part: shares.append(part))
    assert ([tmp_path / "tiny.gguf"], 1) == (opened, len(tables))
    assert (make_reader, make_names) == (gguf.GGUFReader, gguf.get_tensor_name_map)
    assert (sorted(shares), 1.0) == (shares, shares[-1])
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, mine in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.0.mlp.gate_proj.weight", "blk.0.ffn_gate.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
    ):
        np.testing.assert_array_equal(given[mine], found[name])


def test_a_disk_without_room_for_the_converted_model_is_said(tmp_path: Path) -> None:
    """A limit of this process takes the place of a full disk."""
    write_gguf(tmp_path / "tiny.gguf")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(ModelError, match="MiB in float32, cannot be written to"):
            convert(tmp_path / "tiny.gguf", tmp_path / "out", lambda *_: None)
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
def test_a_damaged_converted_model_names_the_folder_to_remove(
    tmp_path: Path, file: str, left: int
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    folder, _ = find(str(tmp_path / "tiny.gguf"), tmp_path, lambda *_: None)
    with (folder / file).open("rb+") as written:
        written.truncate(left)
    with pytest.raises(ModelError, match=f"; remove the folder {folder}, and the next start"):
        load_model(str(tmp_path / "tiny.gguf"), device="cpu", dtype="auto", cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["gguf-mine", "gguf-v2-mine", "gguf-v1-0a"])
def test_nobody_is_told_to_remove_a_folder_of_their_own(name: str) -> None:
    assert "" == convert_again(Path(name))


def test_a_converted_model_that_lacks_weights_names_its_folder_too(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    folder, _ = find(str(tmp_path / "tiny.gguf"), tmp_path, lambda *_: None)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"up_proj.weight the first; remove the folder {folder}"):
        load_model(str(tmp_path / "tiny.gguf"), device="cpu", dtype="auto", cache_dir=tmp_path)

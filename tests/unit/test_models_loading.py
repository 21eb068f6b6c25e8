"""Finding and refusing models. Nothing is downloaded."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BloomConfig

from engine.batch import Batch, Span
from engine.errors import ModelError
from engine.execution.runner import ModelRunner
from engine.models import load as load_module
from engine.models import versions
from engine.models.load import LoadedModel, load_model
from engine.request import SamplingParams
from tests.parity import architectures
from tests.support.models import bytes_tokenizer, new_pool, save_tiny_model, stock_model
from tiers.blocks.layout import LayerLayout


def load(name: object, tmp_path: Path, **arguments: str) -> LoadedModel:
    given = {"device": "cpu", "dtype": "auto", **arguments}
    return load_model(str(name), cache_dir=tmp_path / "cache", **given)


def chosen(loaded: LoadedModel, tokens: np.ndarray) -> int | None:
    """The first token after these, by our runner."""
    span = Span(1, tokens, 0, [0, 1], True, SamplingParams(temperature=0))
    (sampled,) = ModelRunner(loaded, new_pool(loaded, 2)).step(Batch([span]))
    return sampled.token


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model as users have it, with a tokenizer."""
    save_tiny_model(tmp_path / "model")
    return tmp_path / "model"


def set_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_folder_is_loaded_and_described(tmp_path):
    save_tiny_model(tmp_path / "model", "qwen3")
    loaded = load(tmp_path / "model", tmp_path)
    assert loaded.layers == (LayerLayout(2, 16, 16),) * 3
    assert (loaded.dtype, loaded.max_context, loaded.eos_token_ids) == ("float32", 1024, {256})
    assert loaded.tokenizer.digest == bytes_tokenizer().digest
    assert loaded.layout(64, "bfloat16").shape == (3, 2, 64, 2, 16)
    assert chosen(loaded, np.arange(20, dtype=np.int32)) is not None


def test_the_digest_is_the_contents(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        save_tiny_model(tmp_path / name, seed=seed)
    a, b, c = (load(tmp_path / name, tmp_path, dtype="float32") for name in "abc")
    assert a.weights_digest == b.weights_digest != c.weights_digest
    half = load(tmp_path / "a", tmp_path, dtype="bfloat16")
    assert half.weights_digest != a.weights_digest


@pytest.mark.parametrize(
    ("published", "dtype", "supported", "says"),
    [
        ("bfloat16", "auto", True, True),
        ("bfloat16", "bfloat16", True, False),
        ("bfloat16", "auto", False, False),
        ("float32", "auto", True, False),
    ],
)
def test_bfloat16_is_recommended_where_the_weights_and_the_processor_have_it(
    published, dtype, supported, says, folder, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("engine.models.load.has_bfloat16", lambda: supported)
    set_config(folder, dtype=published)
    with caplog.at_level("INFO"):
        load(folder, tmp_path, dtype=dtype)
    assert ("--dtype bfloat16" in caplog.text) == says


def test_what_cannot_be_found_says_what_could_be(tmp_path):
    with pytest.raises(ModelError, match=r"no model 'nonsense'.*smollm2-135m"):
        load("nonsense", tmp_path)
    with pytest.raises(ModelError, match="no GGUF file; name the folder of a model"):
        load(tmp_path, tmp_path)
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ModelError, match=r"neither a folder nor a \.gguf file"):
        load(tmp_path / "x.txt", tmp_path)
    (tmp_path / "x.gguf").write_text("not a model")
    with pytest.raises(ModelError, match="not a readable GGUF"):
        load(tmp_path / "x.gguf", tmp_path)
    (tmp_path / "y.gguf").touch()
    with pytest.raises(ModelError, match=r"2 GGUF files; name one, such as .*x\.gguf"):
        load(tmp_path, tmp_path)
    with pytest.raises(ModelError, match="dtype 'int8'"):
        load("smollm2-135m", tmp_path, dtype="int8")


def test_a_folder_without_a_tokenizer_is_refused(folder, tmp_path):
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load(folder, tmp_path)


def shards(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Two files and an index, of which the second file is lost."""
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    index = {name: names[number % 2] for number, name in enumerate(sorted(weights))}
    mine = {name: weights[name] for name, file in index.items() if file == names[0]}
    save_file(mine, folder / names[0], {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def lacking(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """transformers would fill it with random numbers and go on."""
    del weights[UP]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def torn(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def with_weight(name: str, tensor: torch.Tensor) -> Callable[[Path, dict[str, torch.Tensor]], None]:
    def save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
        save_file({**weights, name: tensor}, folder / "model.safetensors", {"format": "pt"})

    return save


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shards, "lacks 1 of 2 files that its index names, model-00002-of-00002.safetensors"),
        (torn, "cannot be loaded"),
        (lacking, f"lacks 1 of the weights .*{UP}"),
        (with_weight(UP, torch.ones(96, 48, dtype=torch.int32)), f"has {UP} in I32"),
        (with_weight(UP, torch.ones(48, 48)), f"lacks 1 of the weights .*{UP}"),
        (with_weight(f"{UP[:-6]}bias", torch.ones(96)), "does not use, .*up_proj.b"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(damage, said, folder, tmp_path):
    damage(folder, load_file(folder / "model.safetensors"))
    with pytest.raises(ModelError, match=said) as refused:
        load(folder, tmp_path)
    assert "\n" not in str(refused.value)


LINEAR = {"factor": 2.0}
SCALED = {"type": "linear", **LINEAR}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rope_scaling": SCALED}, None),
        ({"rope_scaling": {"rope_type": "linear", **LINEAR}}, None),
        ({"rope_parameters": {"rope_type": "linear", **LINEAR}}, None),
        ({"rope_parameters": {"type": "linear", **LINEAR}}, None),
        ({"rope_scaling": {"type": "ntk", **LINEAR}}, "no rope of type ntk"),
        ({"rope_scaling": LINEAR}, "rope of type default has the key factor"),
        ({"rope_scaling": {"type": "linear", "unheard_of": 1, **LINEAR}}, "the key unheard_of"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_parameters"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "dynamic", **LINEAR}},
            "of two types, dynamic and linear",
        ),
        (
            {
                "rope_scaling": {"type": "linear", **LINEAR},
                "rope_parameters": {"rope_type": "default"},
            },
            "contradict each other",
        ),
    ],
)
def test_each_spelling_of_a_rope_is_served_or_refused(config, said, folder, tmp_path):
    path = folder / "config.json"
    given = json.loads(path.read_text())
    del given["rope_parameters"]
    path.write_text(json.dumps(given | config))
    if said is not None:
        with pytest.raises(ModelError, match=said) as refused:
            load(folder, tmp_path)
        assert "\n" not in str(refused.value)
        return
    loaded = load(folder, tmp_path)
    halved = loaded.model.model.rotary_emb.inv_freq * 2
    assert torch.equal(stock_model().model.rotary_emb.inv_freq, halved)


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("t5", "encoder-decoder"),
        ("llama4_text", "layers of kind chunked_attention"),
        ("glm5_next", "glm5_next has a sparse index"),
        ("mistral_large4", "mistral_large4 has a sparse index"),
    ],
)
def test_states_that_blocks_cannot_keep_are_refused_in_a_sentence(
    folder, tmp_path, model_type, said
):
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelError, match=said) as refused:
        load(folder, tmp_path)
    assert len(str(refused.value)) < 200


def test_a_model_that_only_other_engines_compute_is_refused_before_its_weights_are_read(
    folder, tmp_path, monkeypatch
):
    """Their digest alone takes minutes for a checkpoint of that size, and hours to fetch."""
    set_config(folder, model_type="deepseek_v32")
    monkeypatch.setattr(load_module, "digest_of", lambda _: pytest.fail("weights are read"))
    says = "serve it with vLLM: --engine vllm, or --engine URL"
    with pytest.raises(ModelError, match=f"^deepseek_v32 has a sparse index .*{says}$"):
        load(folder, tmp_path)
    config = load_module._load_config(folder)
    monkeypatch.setattr(load_module, "find", lambda *_: pytest.fail("weights are fetched"))
    monkeypatch.setattr(load_module, "_load_config", {Path("owner/model"): config}.get)
    with pytest.raises(ModelError, match=r"^deepseek_v32 has a sparse index"):
        load("owner/model", tmp_path)


@pytest.mark.parametrize(("installed", "says"), [("5.17.0", True), ("5.24.1", False)])
@pytest.mark.parametrize("model_type", ["t5", "bloom"])
def test_a_refusal_under_another_transformers_names_the_versions(
    folder, tmp_path, monkeypatch, installed, says, model_type
):
    if model_type == "t5":  # refused by its config, the other by its modules
        (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    else:
        config = BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    monkeypatch.setattr(versions.transformers, "__version__", installed)
    with pytest.raises(ModelError) as refused:
        load(folder, tmp_path)
    assert says == ("pip install 'transformers>=5.23,<5.25'" in str(refused.value))


def test_kimi_k2_is_deepseek_v3_under_another_name(folder, tmp_path):
    """Its repository names a type of its own, and brings DeepSeek's code along."""
    architectures.stock("deepseek_v3").save_pretrained(folder)
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    set_config(folder, model_type="kimi_k2", auto_map=code)
    loaded = load(folder, tmp_path)
    assert "DeepseekV3ForCausalLM" == type(loaded.model).__name__
    assert loaded.layers == (LayerLayout(1, 40, 32, shared=True),) * 2


@pytest.mark.parametrize("model_type", ["mistral3", "qwen3_vl", "smolvlm"])
def test_of_images_and_text_the_text_is_served(model_type, folder, tmp_path, caplog):
    (folder / "model.safetensors").unlink()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = architectures.config_of(model_type)
        whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(folder)
    with caplog.at_level("INFO"):
        loaded = load(folder, tmp_path)
    assert f"of {model_type} the text is served, and no images" in caplog.text
    assert sum(1 for _ in whole.parameters()) > sum(1 for _ in loaded.model.parameters())
    tokens = torch.arange(30) * 7 % 256
    with torch.inference_mode():
        expected = whole(input_ids=tokens[None], use_cache=False).logits[0, -1].argmax()
    assert int(expected) == chosen(loaded, tokens.int().numpy())


def quantized_by(folder: Path, method: str, **settings: object) -> None:
    set_config(folder, quantization_config={"quant_method": method, **settings})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_weights_in_blocks_are_dequantized(folder, tmp_path, dtype):
    """As DeepSeek's checkpoints come: float8 and a scale for each block of 128 by 128."""
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for each in [each for each in weights if each.endswith("proj.weight")]:
        scale = weights[each].abs().max() / 448
        weights[each] = (weights[each] / scale).to(torch.float8_e4m3fn)
        weights[f"{each}_scale_inv"] = scale.view(1, 1)
    expected = (weights[name].float() * weights[f"{name}_scale_inv"]).to(getattr(torch, dtype))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    quantized_by(folder, "fp8", activation_scheme="dynamic", weight_block_size=[128, 128])
    loaded = load(folder, tmp_path, dtype=dtype)
    actual = loaded.model.get_submodule(name.removesuffix(".weight")).weight
    assert torch.equal(expected, actual)
    assert {expected.dtype} == {each.dtype for each in loaded.model.parameters()}


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "bitsandbytes"])
def test_other_quantizations_are_refused_by_name(folder, tmp_path, method):
    quantized_by(folder, method, bits=4)
    with pytest.raises(ModelError, match=f"quantized by {method}; served are fp8, mxfp4"):
        load(folder, tmp_path)


def test_a_repository_with_code_of_its_own_is_refused_and_nobody_is_asked(
    folder, tmp_path, monkeypatch
):
    """transformers would ask on stdin whether to run it."""
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    set_config(folder, model_type="own", auto_map=code)
    (folder / "code.py").write_text("raise SystemExit('it was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    with pytest.raises(ModelError, match=r"cannot be loaded|no usable tokenizer"):
        load(folder, tmp_path)


def fp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 told plainly: two numbers a byte, the low one first, times a power of two for each 32.

    blocks: [E, rows, groups, 16]; scales: [E, rows, groups]. Returns [E, rows, 32 * groups].
    """
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    signed = torch.where(numbers >= 8, -1.0, 1.0) * table[numbers & 7]
    return (signed * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_experts_are_dequantized(folder, tmp_path, dtype):
    """As gpt-oss comes."""
    architectures.stock("gpt_oss").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    expected = {}
    for name in [name for name in weights if name.endswith(("up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 122, shape, generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = fp4(blocks, scales).transpose(1, 2).to(getattr(torch, dtype))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    quantized_by(folder, "mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    loaded = load(folder, tmp_path, dtype=dtype)
    actual = dict(loaded.model.named_parameters())
    assert expected and all(torch.equal(actual[name], value) for name, value in expected.items())
    assert {getattr(torch, dtype)} == {each.dtype for each in actual.values()}

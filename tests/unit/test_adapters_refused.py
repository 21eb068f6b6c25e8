"""Adapters that cannot be served are refused when they are loaded, with what to do."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import AdapterError
from engine.models.load import load_adapter
from tests.support.models import save_tiny_adapter, tiny_model

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def loaded():
    return tiny_model()


def refusal(loaded, source):
    with pytest.raises(AdapterError, match="adapter bad") as caught:
        load_adapter(loaded, "bad", str(source))
    assert "bad" not in loaded.adapters.digests
    return str(caught.value)


def change_config(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def change_weights(folder, **values):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for key, value in values.items():
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, path)
    return folder


def test_files_that_are_missing_or_broken(loaded, tmp_path):
    assert "there is no folder" in refusal(loaded, tmp_path / "nothing")
    assert "holds no adapter_config.json" in refusal(loaded, tmp_path)
    save_tiny_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    assert "cannot be read" in refusal(loaded, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    assert "cannot be read" in refusal(loaded, tmp_path)


def test_what_is_not_lora(loaded, tmp_path):
    from peft import IA3Config, get_peft_model

    from tests.support.models import stock_model

    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    get_peft_model(stock_model(), config).save_pretrained(tmp_path)
    assert "is of kind IA3; only LoRA is served" in refusal(loaded, tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        # More than low-rank updates.
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices=[1, 2]"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "changes the base model's weights"),
        # What matches nothing.
        ({"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "w1"]}, "'w1' in its target_"),
        ({"target_modules": ["q_proj", "k_proj", "v_proj"]}, "does not target, model.layers.0"),
        ({"target_modules": ["q_proj", "up_proj"]}, "lacks weights for 3 of the modules"),
        ({"target_modules": "all-linear"}, "lacks weights for 9 of the modules"),
        ({"target_modules": "nothing"}, "does not target, model.layers.0"),
        ({"target_modules": None}, "no target_modules"),
        ({"rank_pattern": {"c_attn": 8}}, "'c_attn' in its rank_pattern"),
        ({"alpha_pattern": {"layers.9.q_proj": 8}}, "'layers.9.q_proj' in its alpha_pattern"),
        ({"layers_to_transform": [0, 1, 2, 9]}, "9 in its layers_to_transform"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"r": 4}, "rank 8"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(loaded, tmp_path, config, said):
    save_tiny_adapter(tmp_path)
    assert said in refusal(loaded, change_config(tmp_path, **config))


def matrices(module, inputs, outputs):
    name = f"base_model.model.{module}"
    weights = {"A": torch.ones(8, inputs), "B": torch.ones(outputs, 8)}
    return {f"{name}.lora_{each}.weight": values for each, values in weights.items()}


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({f"{Q}.lora_B.weight": None}, "only one of two matrices"),
        (
            {f"{Q}.lora_A.weight": None, f"{Q}.lora_B.weight": None},
            "lacks weights for 1 of the modules",
        ),
        ({f"{Q}.lora_magnitude_vector": torch.ones(96)}, "not a low-rank update"),
        ({f"{Q}.lora_A.weight": torch.full((8, 48), torch.nan)}, "not finite"),
        (
            matrices("model.layers.9.self_attn.q_proj", 48, 96),
            "model.layers.9.self_attn.q_proj, which is not a linear layer",
        ),
        (matrices("lm_head", 48, 258), "lm_head, which is not a linear layer between"),
    ],
)
def test_weights_that_do_not_belong_together(loaded, tmp_path, weights, said):
    save_tiny_adapter(tmp_path)
    assert said in refusal(loaded, change_weights(tmp_path, **weights))


def test_another_base_model(loaded, tmp_path):
    save_tiny_adapter(tmp_path)
    change_config(tmp_path, base_model_name_or_path="org/other")
    change_weights(tmp_path, **{f"{Q}.lora_A.weight": torch.ones(8, 64)})
    message = refusal(loaded, tmp_path)
    assert "has 48 inputs and 96 outputs; it was made for org/other" in message


def test_a_layer_that_is_not_computed_for_every_token(loaded, tmp_path, monkeypatch):
    """As in a mixture of experts, where a layer sees the rows that were routed to it."""
    save_tiny_adapter(tmp_path, target_modules=["down_proj"])
    mlp = type(loaded.model.get_submodule("model.layers.0.mlp"))
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, rows: forward(self, rows[:, :3]).sum(1, True))
    assert "not computed for every token" in refusal(loaded, tmp_path)

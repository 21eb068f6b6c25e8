"""Every type that transformers calls a causal language model is in the table of those that answer
exactly, or its load refuses it in one sentence. No type ends in a stack trace or in other tokens.
"""

import logging
from contextlib import contextmanager

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import ModelError
from engine.models.load import describe, refuse_unsupported
from tests.parity.architectures import ARCHITECTURES, REFUSED, tiny_config
from tests.support.models import bytes_tokenizer

LONGEST = 300  # characters of a refusal


def test_every_type_is_in_the_table_or_refused():
    """A type whose config is another's is that one in a checkpoint too."""
    known = {*ARCHITECTURES, *REFUSED}
    assert not REFUSED.keys() & ARCHITECTURES.keys()
    unknown = [
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name not in known and CONFIG_MAPPING[name].model_type not in known - {name}
    ]
    assert not unknown, "add them to ARCHITECTURES or REFUSED"
    assert REFUSED.keys() <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_type_that_is_not_exact_is_refused_in_one_sentence(model_type):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    reason, own = REFUSED[model_type]
    with pytest.raises(ModelError, match=reason) as refused:
        load(model_type, own)
    said = str(refused.value)
    assert len(said) < LONGEST and "\n" not in said, said
    assert "meta tensors" not in said, "give it a config, so that it computes"


def test_zamba_2_with_several_groups_of_heads_is_refused():
    """transformers' own logits differ between its whole forward and one from its states."""
    own = ARCHITECTURES["zamba2"]
    with pytest.raises(ModelError, match="gives other logits in chunks than alone"):
        load("zamba2", {**own, "mamba_ngroups": 2})


def load(model_type, own):
    """What a load does to a model of this type, without files."""
    with as_loading():
        config = CONFIG_MAPPING[model_type]() if own is None else tiny_config(model_type, own)
        refuse_unsupported(config)
        with torch.device("meta" if own is None else "cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval().requires_grad_(False)
    digest = b"0" * 16
    describe("m", model, bytes_tokenizer(), weights_digest=digest, dtype="float32", device="cpu")


@contextmanager
def as_loading():
    """Whatever transformers raises is a ModelError, as in `engine.models.load`."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(f"cannot be loaded: {first}") from error

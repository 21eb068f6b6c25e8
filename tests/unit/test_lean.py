"""What of torch a server does not import, and that it is whole for whoever does."""

import subprocess
import sys

CODE = """
import sys
from engine.lean import import_transformers
import_transformers()
import cachesvc.server.compute, cachesvc.service
import engine.models.load, engine.composition
from transformers import LlamaConfig, LlamaForCausalLM

LEFT_OUT = ("sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor")
assert not [name for name in LEFT_OUT if name in sys.modules], "imported"

import torch
from torch.testing import assert_close
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval()
with torch.inference_mode():
    logits = model(torch.arange(8)[None]).logits
assert not [name for name in LEFT_OUT if name in sys.modules], "imported by a forward pass"

# Whoever uses them gets torch's own.
from transformers.masking_utils import create_causal_mask
mask = create_causal_mask(
    model.config, torch.zeros(1, 8, 32), None, None,
    and_mask_function=lambda batch, head, q, kv: torch.tensor([[True] * 8] * 8)[q, kv],
)
assert_close(mask[0, 0], torch.ones(8, 8, dtype=torch.bool).tril())
import torch._dynamo
assert torch._dynamo.__file__ and torch._dynamo.disable(len) is not len
assert torch.distributed.is_available()
double = torch.compile(lambda x: x * 2, backend="eager")
assert_close(double(torch.ones(3)), torch.full((3,), 2.0))
"""

FALLBACK = """
import sys
from engine.lean import _Compiler, _remove
stand_in = sys.modules["torch._dynamo"] = _Compiler("torch._dynamo")
config = stand_in.config  # a newer transformers may ask for more
import torch._dynamo
assert torch._dynamo is not stand_in and config is torch._dynamo.config
"""


def _run(code: str) -> None:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr


def test_a_server_imports_no_compiler_and_no_tensors_over_many_devices() -> None:
    _run(CODE)


def test_what_a_stand_in_lacks_comes_from_the_module() -> None:
    _run(FALLBACK)

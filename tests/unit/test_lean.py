"""What of torch a server does not import, and that it is whole for whoever does; and that what is
frozen for speed is still taken apart when the process ends."""

import json
from pathlib import Path

from tests.children import ran
from tests.support.models import save_tiny_model
from tests.support.stand_in import served
from tests.support.upstream import CHAT, UpstreamServer, body

CODE = """
import sys
from pathlib import Path
from engine.lean import without_training
with without_training():
    from torch._dynamo.utils import is_compile_supported  # as torchvision does
    from cachesvc.server.compute import load
    from cachesvc.config.sections import ModelSection
    import cachesvc.service
    loaded = load(ModelSection(name=sys.argv[1]), Path(sys.argv[2]), None)

assert "api.admin.router" not in sys.modules, "the admin routes wait for an admin"

import torch
from torch.testing import assert_close
model = loaded.model
LEFT_OUT = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.onnx", "sympy")
assert not [name for name in LEFT_OUT if name in sys.modules], "imported"

# Whoever uses them gets torch's own.
from transformers.masking_utils import create_causal_mask
model.config._attn_implementation = "sdpa"
mask = create_causal_mask(
    model.config, torch.zeros(1, 8, model.config.hidden_size), None, None,
    and_mask_function=lambda batch, head, q, kv: torch.tensor([[True] * 8] * 8)[q, kv],
)
assert_close(mask[0, 0], torch.ones(8, 8, dtype=torch.bool).tril())
import torch._dynamo
assert torch._dynamo.__file__ and torch._dynamo.disable(len) is not len
assert is_compile_supported("cpu") is torch._dynamo.utils.is_compile_supported("cpu")
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

RELAY = """
import json, os, signal, sys, threading, urllib.request
from cachesvc.config.sources import load_settings
from cachesvc.serve import serve

def ask(url, body=None):
    sent = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(sent) as answer:
        return answer.read().decode()

def visit(url):
    try:
        ask(url + "/health/ready")
        for name in ("one", "two"):
            asked = json.loads(sys.argv[3]) | {"model": name}
            answer = json.loads(ask(url + sys.argv[2], json.dumps(asked).encode()))
            assert answer["usage"]["prompt_tokens"] == 100
        assert "cachesvc_engine_up" in ask(url + "/metrics")
        print([name for name in ("torch", "transformers", "tokenizers") if name in sys.modules])
    finally:
        os.kill(os.getpid(), signal.SIGTERM)

def ready(settings, url, link):
    threading.Thread(target=visit, args=(url,)).start()

relays = [
    {"name": name, "engine": f"openai+{sys.argv[1]}", "vllm": {"max-model-len": 4000}}
    for name in ("one", "two")
]
settings = {"server.data_dir": sys.argv[4], "server.port": 0, "models": relays}
serve(load_settings(settings).settings, on_ready=ready)
"""


def test_a_server_before_endpoints_alone_imports_no_torch_and_no_tokenizers(tmp_path):
    with served(UpstreamServer()) as up:
        printed = ran(RELAY, up.url, CHAT, json.dumps(body(CHAT)), tmp_path / "data")
    assert "[]" == printed.splitlines()[-1], printed


def test_a_server_imports_no_compiler_and_no_tensors_over_many_devices(tmp_path):
    save_tiny_model(tmp_path / "tiny")
    ran(CODE, tmp_path / "tiny", tmp_path)


def test_what_a_stand_in_lacks_comes_from_the_module():
    ran(FALLBACK)


FOLDER = Path(__file__).parents[2] / "engine"
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import garbage

class Watched:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("freed")

Watched()
kept = Watched()
garbage.freeze_loaded()
print("frozen")
"""
SELDOM = """
import gc
import sys
sys.path.insert(0, sys.argv[1])
usual = gc.get_threshold()
import garbage
garbage.freeze_loaded()
print(gc.get_threshold() == usual)
with garbage.scanning_seldom():
    print(gc.get_threshold() == (garbage.YOUNG, *usual[1:]))
garbage.thaw()
print(gc.get_threshold() == usual)
"""


def test_a_cycle_is_freed_before_the_freeze_or_at_the_end() -> None:
    assert ["freed", "frozen", "freed"] == ran(PROGRAM, FOLDER).split()


def test_only_a_server_scans_the_young_seldom() -> None:
    assert 3 * ["True"] == ran(SELDOM, FOLDER).split()

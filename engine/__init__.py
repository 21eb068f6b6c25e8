"""Token ids in, token ids out: scheduler, paged attention, runner. Knows no HTTP and no money.

`from engine import LLM, SamplingParams` is the offline interface. Its names are imported on first
use, so that importing only `engine.request` does not load torch. The import sets how OpenMP's
threads wait (`engine.openmp`), which has to happen before torch is loaded.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine import openmp

if TYPE_CHECKING:
    from engine.offline.llm import LLM
    from engine.offline.outputs import CompletionOutput, LoRARequest, RequestMetrics, RequestOutput
    from engine.request import SamplingParams
    from engine.structure import StructuredOutputs

__all__ = [
    "LLM",
    "CompletionOutput",
    "LoRARequest",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]

openmp.configure(os.environ)  # noqa: TID251  before any module here imports torch

_MODULES = {
    "LLM": "engine.offline.llm",
    "CompletionOutput": "engine.offline.outputs",
    "LoRARequest": "engine.offline.outputs",
    "RequestMetrics": "engine.offline.outputs",
    "RequestOutput": "engine.offline.outputs",
    "SamplingParams": "engine.request",
    "StructuredOutputs": "engine.structure",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

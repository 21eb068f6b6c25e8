"""A context cache for LLM serving. `from cachesvc import LLM, SamplingParams` is the offline API.

Names are imported on first use, because the command line imports this package too and must not wait
for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import LLM, LoRARequest, RequestOutput, SamplingParams, StructuredOutputs

__version__ = "0.1.0"
__all__ = ["LLM", "LoRARequest", "RequestOutput", "SamplingParams", "StructuredOutputs"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("engine"), name)

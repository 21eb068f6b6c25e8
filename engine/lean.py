"""Imports transformers without the parts of torch that only training and compiling need.

transformers asks for `torch.distributed.tensor` and `torch._dynamo` as it is imported, for models
spread over many devices and for functions that a compiler must leave alone. Here a model is on one
device, and nothing of transformers is compiled. They are a quarter of a server's imports.

A program of our own imports the rest of `engine` and loads its model inside `without_training`. A
library must not: the program around it may train.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_COMPILER = "torch._dynamo"
_INDEXING = f"{_COMPILER}._trace_wrapped_higher_order_op"
_SUPPORT = f"{_COMPILER}.utils"

Function = Callable[..., Any]


@contextmanager
def without_training() -> Iterator[None]:
    """Inside, models are imported and loaded as by a torch that is built without
    `torch.distributed`, and `torch._dynamo` is imported only by what needs more than its marks.

    Main thread, while no other thread imports torch.
    """
    import torch
    from transformers.utils import is_torch_distributed_available

    available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        is_torch_distributed_available()  # asks once and remembers
    finally:
        torch.distributed.is_available = available
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER], sys.modules[_INDEXING] = _Compiler(_COMPILER), _Indexing(_INDEXING)
        sys.modules[_SUPPORT] = _Support(_SUPPORT)
    try:
        _import_models()
        yield
    finally:
        _remove()


def _import_models() -> None:
    try:
        import transformers.masking_utils
        import transformers.modeling_utils  # noqa: F401
    except ImportError as error:
        logger.info(f"transformers is imported with torch's compiler: {error}")
        _remove()


class _Later(ModuleType):
    """Stands for a module. What it does not have itself is taken from the module, imported then."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


class _Compiler(_Later):
    """`torch._dynamo`, whose marks on functions mean something to the compiler only."""

    @staticmethod
    def disable(function: Function | None = None, recursive: bool = True, **_: Any) -> Function:
        return _Compiler.allow_in_graph if function is None else function

    @staticmethod
    def allow_in_graph(function: Function) -> Function:
        return function

    assume_constant_result = allow_in_graph


class _Indexing(_Later):
    """The module of a context in which transformers indexes masks. It is rarely entered."""

    @staticmethod
    def TransformGetItemToIndex() -> Any:  # noqa: N802 - the class's name
        return _real(_INDEXING).TransformGetItemToIndex()


class _Support(_Later):
    """The module whose function torchvision's `roi_align` asks when it is called. transformers
    imports torchvision where that and Pillow are installed."""

    @staticmethod
    def is_compile_supported(device_type: str) -> Any:
        return _real(_SUPPORT).is_compile_supported(device_type)


def _real(name: str) -> ModuleType:
    _remove()
    __import__(name)
    return sys.modules[name]


def _remove() -> None:
    for name in (_COMPILER, _INDEXING, _SUPPORT):
        if isinstance(sys.modules.get(name), _Later):
            del sys.modules[name]

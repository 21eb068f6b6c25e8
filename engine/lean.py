"""Imports transformers without the parts of torch that only training and compiling need.

transformers asks for `torch.distributed.tensor` and `torch._dynamo` as it is imported, for models
spread over many devices and for functions that a compiler must leave alone. Here a model is on one
device, and nothing of transformers is compiled. They are a quarter of a server's imports.

It also reads the 2,300 files of its models for the names in them. Here it does so when somebody
asks it for a name that is not there yet. A start does not: `AutoModelForCausalLM` goes to a model's
own files.

A program of our own imports the rest of `engine` and loads its model inside `without_training`. A
library must not: the program around it may train.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, reload
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_COMPILER = "torch._dynamo"
_INDEXING = f"{_COMPILER}._trace_wrapped_higher_order_op"
_SUPPORT = f"{_COMPILER}.utils"
_NAMES = "transformers.utils.import_utils"  # the module that reads
_READ = "create_import_structure_from_path"  # its function,
_PACKAGE = "_LazyModule"  # and the class of packages that have names from it

Function = Callable[..., Any]


@contextmanager
def without_training() -> Iterator[None]:
    """Inside, models are imported and loaded as by a torch that is built without
    `torch.distributed`, and `torch._dynamo` is imported only by what needs more than its marks.

    Main thread, while no other thread imports torch.
    """
    import torch

    reading = _ReadingLater()
    sys.meta_path.insert(0, reading)
    try:
        from transformers.utils import is_torch_distributed_available
    finally:
        sys.meta_path.remove(reading)

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


class _ReadingLater(MetaPathFinder):
    """Finds that module in the usual way, and lets it read the names of models later."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _NAMES else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if hasattr(module, _READ) and hasattr(module, _PACKAGE):
                _read_later(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _read_later(module: Any) -> None:
    """Let packages begin with the names of the folder `auto`, which finds the classes of models.
    The first name that they lack has them made again with all."""
    read, find = getattr(module, _READ), getattr(module, _PACKAGE).__getattr__
    models = Path(module.__file__).parents[1] / "models"
    unread, lock = {"transformers", "transformers.models"}, RLock()

    def read_few(path: str | Path) -> Any:
        whole = Path(path) in (models, models / "__init__.py")
        return {"auto": read(models / "auto")} if whole else read(path)

    def find_or_read(package: Any, name: str) -> Any:
        try:
            return find(package, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            if PathFinder.find_spec(inner := f"{package.__name__}.{name}", package.__path__):
                return import_module(inner)
            with lock:
                if package.__name__ in unread:
                    unread.remove(package.__name__)
                    setattr(module, _READ, read)
                    module.define_import_structure.cache_clear()
                    reload(package)  # another one takes its place
            whole = sys.modules.get(package.__name__)
            if whole is package:
                raise
            return getattr(whole, name)

    setattr(module, _READ, read_few)
    getattr(module, _PACKAGE).__getattr__ = find_or_read


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

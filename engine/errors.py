"""What can go wrong in the engine.

EngineError
├── RequestError            this request cannot be served; the others continue
│   ├── PromptTooLong       more tokens than the model or the pool can hold
│   ├── EmptyPrompt
│   ├── InvalidParameter    a sampling parameter out of its range; names it
│   ├── InvalidImage        an unusable image, or none where one is expected
│   ├── StructureUnavailable structured output needs a package that is not installed
│   └── UnknownAdapter
├── QueueFull               too many requests are waiting; try later
├── EngineFailed            the step loop died; every request fails with its cause
├── EngineClosed            submitted after close
└── ModelError              a model that cannot be loaded or is not supported; raised at start-up
    └── AdapterError        the same for a LoRA adapter
"""


class EngineError(Exception):
    """Any failure of the engine that a caller can act on."""


class RequestError(EngineError):
    """The request cannot be served as sent; `param` names the field at fault, if any."""

    param: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """The prompt does not fit the model's context or the device pool."""


class EmptyPrompt(RequestError):
    """The prompt is empty."""


class InvalidParameter(RequestError):
    """A sampling parameter is out of its range."""


class InvalidImage(RequestError):
    """An image cannot be read, is too large, or has no place in the prompt. The message says
    why."""


class StructureUnavailable(RequestError):
    """Structured output needs a package that is not installed."""


class UnknownAdapter(RequestError):
    """No adapter of that name is loaded."""


class QueueFull(EngineError):
    """The queue is full."""


class EngineFailed(EngineError):
    """The engine has stopped with an error; its cause is chained."""


class EngineClosed(EngineError):
    """The engine is closed or closing."""


class ModelError(EngineError):
    """A model that cannot be loaded, or whose attention cannot be paged. The message says why."""


class AdapterError(ModelError):
    """A LoRA adapter that cannot be read, is for another model, or is not plain LoRA."""

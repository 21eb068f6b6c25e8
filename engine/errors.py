"""What can go wrong in the engine: a request that cannot be served, or the engine, or a model."""


class EngineError(Exception):
    """Any failure of the engine that a caller can act on."""


class RequestError(EngineError):
    """The request cannot be served as sent; `param` names the field at fault, if any."""

    param: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """More tokens than the model's context or the device pool holds."""


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
    """Too many requests are waiting; try later."""


class EngineFailed(EngineError):
    """The engine has stopped with an error; its cause is chained."""


class EngineClosed(EngineError):
    """The engine is closed or closing."""


class ModelError(EngineError):
    """A model that cannot be loaded, or whose attention cannot be paged. Raised at start-up."""


class AdapterError(ModelError):
    """A LoRA adapter that cannot be read, is for another model, or is not plain LoRA."""

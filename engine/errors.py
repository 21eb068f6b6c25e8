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


class RemoteFault(EngineError):
    """The engine at a URL did not answer as it should: an error, an answer that breaks off or
    cannot be read."""

    # The message is a sentence for clients, which tells nothing of the inside. `retry_after_s` is
    # when to try again, if the engine said so.
    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RemoteRefused(RemoteFault):
    """The engine at a URL found something wrong with this request."""


class RemoteDenied(RemoteFault):
    """The engine at a URL wants another key, or does not know what was asked for."""


class RemoteBusy(RemoteFault):
    """The engine at a URL has too much to do."""


class RemoteAway(RemoteFault):
    """The engine at a URL cannot be reached, or says that it cannot serve now."""


class RemoteSilent(RemoteFault):
    """The engine at a URL said nothing for too long."""


class ModelError(EngineError):
    """A model that cannot be loaded, or whose attention cannot be paged. Raised at start-up."""


class EngineAway(ModelError):
    """Nothing answers where an engine should be. Raised at start-up, if no other engine does."""


class AdapterError(ModelError):
    """A LoRA adapter that cannot be read, is for another model, or is not plain LoRA."""

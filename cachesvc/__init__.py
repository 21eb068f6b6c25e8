"""A context cache for LLM serving: the command line, settings, metrics, and the service."""

__version__ = "0.1.0"

"""Errors in settings and data directories."""


class ConfigError(Exception):
    """An invalid setting. The message names it, its origin and valid values."""

"""Errors in settings and data directories."""


class ConfigError(Exception):
    """An invalid setting. The message names it, its origin and valid values."""


class WrongOption(ConfigError):
    """An option of the command line that is unknown or has an invalid value."""

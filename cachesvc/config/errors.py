"""What is wrong with a setting or a data directory."""


class ConfigError(Exception):
    """A setting that cannot be used; the message names it, its origin, and what would do."""

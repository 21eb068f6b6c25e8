"""Options that override settings. Unset, the environment, the file or the default applies."""

from typing import Any

import typer

from cachesvc.config.settings import known_settings

HELP = known_settings()
_SETTING_OF: dict[str, str] = {}  # by the option that overrides it


def overriding(setting: str, *flags: str, meaning: str = "") -> Any:
    """An option that overrides `setting`; it means what the setting does, or `meaning`."""
    _SETTING_OF[flags[0].partition("/")[0]] = setting
    return typer.Option(*flags, help=meaning or HELP[setting], show_default=False)


def overridden(context: typer.Context) -> dict[str, Any]:
    """What the options of this command were given, by setting; None where they were not."""
    options = {each.opts[0]: context.params[each.name or ""] for each in context.command.params}
    return {_SETTING_OF[flag]: value for flag, value in options.items() if flag in _SETTING_OF}

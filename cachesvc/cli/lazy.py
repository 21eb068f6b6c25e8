"""Command groups that import only the called command and explain removed ones."""

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from cachesvc.cli.removed import instead_of
from cachesvc.importing import importing

_STYLE = re.compile(r"\[(?=[a-z#/@][^\[\]]*\])")
_LINE_END = re.compile(r"(?<!\n)\n *(?!\n)")


class Command(NamedTuple):
    """A command's `module:attribute` (a function or a `Typer`) and its help."""

    target: str
    help: str


class Group(TyperGroup):
    """A group that says for each removed command what to do instead."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and (instead := instead_of(ctx, args[0])):
            ctx.fail(f"{ctx.command_path} {args[0]} was removed: {instead}")
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """A group that knows its commands by name and help, and imports the called one."""

    entries: Mapping[str, Command] = {}

    def load(self, name: str) -> Any:
        return load(name, self.entries[name])

    def get_params(self, ctx: Any) -> list[Any]:
        return [_without_bool(each) for each in super().get_params(ctx)]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, self.load(name) if name and name in self.entries else stub, rest


def lazy_group(
    commands: Mapping[str, Command], *, of: type[LazyGroup] = LazyGroup, **options: Any
) -> typer.Typer:
    """A group of `commands`; `options` are those of `typer.Typer`."""
    kind = type("Lazy", (of,), {"entries": commands})
    group = typer.Typer(cls=kind, no_args_is_help=True, **options)
    for name, entry in commands.items():
        group.command(name, help=entry.help)(_stub)
    return group


def load(name: str, entry: Command) -> Any:
    module, _, attribute = entry.target.partition(":")
    with importing():
        target = getattr(importlib.import_module(module), attribute)
    if isinstance(target, typer.Typer):
        group = get_group(target)
        group.name = name
        return _literal(group)
    outer = typer.Typer(add_completion=False, rich_markup_mode="rich")
    settings = getattr(target, "context_settings", None)
    outer.command(name, context_settings=settings)(target)
    return _literal(get_command(outer))


def _literal(command: Any) -> Any:
    """The command with its help as text: Rich takes `[all time]` for a style, and drops it. It also
    keeps the line ends of a paragraph in the source, which do not suit a narrow terminal."""
    for each in (command, *command.get_params(typer.Context(command))):
        text = _LINE_END.sub(" ", inspect.cleandoc(getattr(each, "help", None) or ""))
        each.help = _STYLE.sub(r"\\\g<0>", text) or None
        _without_bool(each)
    for child in getattr(command, "commands", {}).values():
        _literal(child)
    return command


def _without_bool(option: Any) -> Any:
    """The same option; if it takes no value, `--help` shows no type for it."""
    if getattr(option, "is_flag", False) and option.metavar is None:
        option.metavar = ""
    return option


def _stub() -> None:
    """Placeholder in the list of commands; the group calls the real command."""

"""Commands of `cachesvc`, called in this process."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from cachesvc.cli import app


def call(*words: object, **options: Any) -> Result:
    """How a command ended; `options` are those of typer's runner."""
    return CliRunner().invoke(app, [str(word) for word in words], **options)


def said(*words: object, code: int = 0, **options: Any) -> str:
    """What it says, errors too, on one line and without frames; it ends with this exit code."""
    ended = call(*words, **options)
    assert ended.exit_code == code, ended.output + repr(ended.exception)
    return " ".join(ended.output.replace("│", " ").split())


def told(*words: object, **options: Any) -> Any:
    """What it prints with --json."""
    ended = call(*words, "--json", **options)
    assert ended.exit_code == 0, ended.output + repr(ended.exception)
    return json.loads(ended.stdout)

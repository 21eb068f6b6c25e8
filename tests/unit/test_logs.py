"""The log's form, and what it never says."""

import io
import json
import logging
from typing import Any

import pytest

from cachesvc.config.sections import LogSection
from cachesvc.server.logs import configure

KEY = "sk-live1234abcdefghijklmnopqrstuv"


def written(log_format: Any) -> io.StringIO:
    out = io.StringIO()
    configure(LogSection(format=log_format, level="info"), out)
    return out


def test_a_line_is_json_where_nobody_looks_on():
    out = written("auto")
    logging.getLogger("tiers.disk.tier").debug("not so important")
    logging.getLogger("tiers.disk.tier").warning("no room", extra={"blocks": 3})
    line = json.loads(out.getvalue())
    said = {"event": "no room", "level": "warning", "logger": "tiers.disk.tier", "blocks": 3}
    assert said.items() <= line.items()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("term", "no_color", "coloured"),
    [("xterm-256color", "", True), ("dumb", "", False), ("xterm", "1", False)],
)
def test_colours_are_for_terminals_that_know_them(monkeypatch, term, no_color, coloured):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", no_color)
    out = Terminal()
    configure(LogSection(), out)
    logging.getLogger("api").warning("no room")
    assert coloured == ("\x1b[" in out.getvalue())


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_key_is_masked_in_messages_and_fields(log_format):
    out = written(log_format)
    logging.getLogger("api").info(f"key {KEY} came", extra={"header": f"Bearer {KEY}"})
    assert "abcdefgh" not in out.getvalue()
    assert "sk-live1234" in out.getvalue()


def test_a_traceback_tells_no_local_variables():
    out = written("console")
    prompt = "the patient's " + "name"
    try:
        raise ValueError(len(prompt))
    except ValueError:
        logging.getLogger("api").exception("failed")
    assert "ValueError" in out.getvalue()
    assert "patient" not in out.getvalue().replace('prompt = "the patient', "")

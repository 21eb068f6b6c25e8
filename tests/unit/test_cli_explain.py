"""What `cachesvc explain` asks and prints."""

import pytest
from typer.testing import CliRunner

from cachesvc.cli import app, explain
from cachesvc.cli.explain import _quote_lines

QUOTE = {
    "prompt_tokens": 100,
    "hit_tokens": 64,
    "hit_tokens_by_tier": {"device": 0, "host": 16, "disk": 48},
    "miss_tokens": 36,
    "max_output_tokens": 10,
    "price": {
        "currency": "CNY",
        "prompt": "0.00004",
        "at_most": "0.00006",
        "card": "deepseek-launch",
        "version": "2024-08-02",
        "window": "standard",
    },
}


def test_a_quote_says_where_hits_come_from_and_what_they_cost():
    first, price = _quote_lines(QUOTE)
    assert "100 tokens: 64 would hit (16 from host, 48 from disk), 36 would be computed" == first
    assert "0.00004 CNY for the prompt, at most 0.00006 with 10 tokens" in price


class Asked:
    """A server that keeps what it is asked."""

    def __init__(self):
        self.asked = []

    def get(self, path):
        self.asked.append(path)
        return {}

    def post(self, path, body):
        self.asked.append((path, body))
        return {}


@pytest.mark.parametrize("name", ["mistyped.json", "/nowhere/body"])
def test_a_file_that_does_not_exist_is_no_id(name):
    result = CliRunner().invoke(app, ["explain", name])
    assert (1, f"error: there is no file {name}\n") == (result.exit_code, result.stderr)


def test_a_file_is_a_request_that_was_not_sent_and_else_it_is_an_id(tmp_path, monkeypatch):
    file, server = tmp_path / "request.json", Asked()
    file.write_text('{"prompt": "hi"}')
    monkeypatch.setattr(explain, "running_server", lambda _: server)
    for argument in ("cmpl-1", str(file)):
        result = CliRunner().invoke(app, ["explain", argument, "--json"])
        assert 0 == result.exit_code, result.output
    body = {"prompt": "hi"}
    assert [
        "/admin/api/requests/cmpl-1",
        ("/admin/api/cache/quote", {"tenant": "default", "request": body}),
    ] == server.asked

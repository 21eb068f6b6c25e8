"""What `cachesvc explain` and `cachesvc diff` print, of what a server told them."""

import pytest
from typer.testing import CliRunner

from cachesvc.cli import app
from cachesvc.cli.explain import _diff_lines, _quote_lines

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
    "ttft_ms": {"low": 71.2, "high": 118.6},
}


def test_the_caret_stands_under_the_first_token_that_differs() -> None:
    told = {
        "same": False,
        "at_token": 12,
        "tokens": [40, 41],
        "before": "It is\n",
        "after": ["Monday, the", "Tuesday, the"],
    }
    said, one, other, caret = _diff_lines(told, "a.json", "b.json")
    assert "12 tokens are the same, of 40 and 41" == said
    assert ("M", "T", "^") == (one[caret.index("^")], other[caret.index("^")], caret.strip())


def test_equal_prompts_are_said_to_be() -> None:
    assert ["the same prompt, 7 tokens"] == _diff_lines({"same": True, "at_token": 7}, "a", "b")


def test_a_quote_says_where_hits_come_from_and_what_they_cost() -> None:
    first, price, took = _quote_lines(QUOTE)
    assert "100 tokens: 64 would hit (16 from host, 48 from disk), 36 would be computed" == first
    assert "0.00004 CNY for the prompt, at most 0.00006 with 10 tokens" in price
    assert "first token in 71 to 119 ms" == took


@pytest.mark.parametrize("arguments", [[], ["id", "-f", "x.json"]])
def test_one_request_is_asked_about(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert (2, True) == (result.exit_code, "give the id of a request" in result.output)

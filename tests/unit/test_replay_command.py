"""`cachesvc replay` as users run it."""

import json

import pytest
import typer
from typer.testing import CliRunner

from cachesvc.cli.replay import replay

app = typer.Typer()
app.command()(replay)

CHAINS = [[0, 1, 2], [0, 3], [0, 1, 2, 4], [0, 3, 5], [6, 7, 8], [0, 1, 2, 4, 9]]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 1000 * i, "input_length": 512 * len(chain), "hash_ids": chain}
        for i, chain in enumerate(CHAINS)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def results(*arguments: str):
    outcome = run(*arguments, "--json")
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.stdout)


def test_json_has_a_result_for_each_capacity(trace):
    found = results(trace, "--capacity-blocks", "5,100%")
    assert [each["capacity_blocks"] for each in found] == [5, 10]
    unlimited = found[1]
    assert unlimited["tokens"] == 512 * 20
    assert unlimited["hit_tokens"] == 512 * 10
    assert unlimited["hit_rate"] == 0.5


def test_tiers_show_hits_and_writes_of_each(trace):
    (one,) = results(trace, "--tiers", "device=2,host=30%,disk=90%")
    assert [tier["name"] for tier in one["tiers"]] == ["device", "host", "disk"]
    assert sum(tier["hit_tokens"] for tier in one["tiers"]) == one["hit_tokens"] == 5120
    written = one["tiers"][2]["written_blocks"]
    shown = run(trace, "--tiers", "device=2,host=30%,disk=90%").stdout.split()
    assert [written > 0, str(written)] == [True, shown[-1]]


def test_the_table_is_for_people(trace):
    shown = run(trace, "--capacity-blocks", "10")
    assert shown.exit_code == 0
    for text in ("6 requests", "10,240 tokens", "0.5000", "of all"):
        assert text in shown.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity-blocks", "0"], "'0' is neither a number of blocks"),
        (["--capacity-blocks", "5,"], "'' is neither a number of blocks"),
        (["--capacity-blocks", "nan%"], "'nan%' is neither"),
        (["--tiers", "device"], "is not NAME=SIZE"),
        (["--tiers", "a=5"], "the tiers are device, host, disk"),
        (["--block-tokens", "2000"], "give the trace's own block size"),
    ],
)
def test_bad_input_is_told_what_was_wrong(trace, arguments, message):
    outcome = run(trace, *arguments)
    assert outcome.exit_code == 2
    words = " ".join(outcome.output.replace("│", " ").split())
    assert message in words
    assert "No such file" in run("/no/such/trace.jsonl").output

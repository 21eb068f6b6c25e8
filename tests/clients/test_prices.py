"""LiteLLM reads the price map that we print, and adds up an answer as our ledger does."""

import pytest
from typer.testing import CliRunner

from billing.prices.cards import parse_card
from billing.prices.rating import rate
from billing.usage import Usage
from cachesvc.cli import app
from tests.clients.matrix import PROGRAMS
from tests.patience import ended
from tests.unit.test_billing_cli import USD_CARD

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

ADD_UP = """
import json, os, sys
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
litellm.register_model(json.load(sys.stdin))
usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
usage["prompt_tokens_details"] = {"cached_tokens": 64}
answer = litellm.ModelResponse(model="qwen3-8b", usage=usage)
print(litellm.completion_cost(answer, model="openai/qwen3-8b"))
"""


def test_litellm_adds_up_what_our_ledger_would(tmp_path):
    card = tmp_path / "usd.toml"
    card.write_text(USD_CARD)
    asked = ["prices", "export", str(card), "--model", "qwen3-8b", "--litellm"]
    told = CliRunner().invoke(app, asked)
    python = PROGRAMS["litellm"].interpreter
    done = ended(python, "-c", ADD_UP, input=told.stdout, check=True)
    pinned = parse_card(USD_CARD).pin("qwen3-8b", "standard")
    ours = rate(Usage(hit_disk=64, miss=36, output=10), pinned).amount
    assert ours == round(float(done.stdout.splitlines()[-1]) * 10**12)

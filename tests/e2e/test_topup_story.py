"""A balance that falls asks the shop's webhook for a top-up: through an error, kills and doubled
payments it is one ask, one reference and one deposit, and the ledger proves.
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from billing.money import UNITS
from tests.contract.test_alerts import Receiver
from tests.live_server import SCRIPT, ForkedServer
from tests.patience import PATIENCE_S
from tests.support.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PROMPT = list(range(1, 101))  # 100 misses and 20 tokens of output: 0.00014 of the launch card


@pytest.fixture
def shop() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def until(done: Callable[[], object]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def run(server: ForkedServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPT), *arguments, "--data-dir", str(server.data_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_a_balance_that_falls_is_topped_up_once(tmp_path: Path, shop: Receiver) -> None:
    save_tiny_model(tmp_path / "tiny")
    server = ForkedServer(tmp_path, tmp_path / "tiny", CACHESVC_BILLING__ALERTS_TO=shop.url)
    headers = server.customer("acme", UNITS)
    shop.answers = [500]  # the shop is away, and the message must come again
    try:
        server.start()
        refill = ("refill", "acme", "0.9999", "--per", "topup", "--ask", "1", "--most", "2")
        assert 0 == run(server, "tenants", "budget", *refill).returncode
        question = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}
        url = f"{server.url}/v1/completions"
        assert (
            200 == httpx.post(url, json=question, headers=headers, timeout=PATIENCE_S).status_code
        )
        until(lambda: shop.got)
        server.kill()
        server.start()
        until(lambda: len(shop.got) >= 2)
        (asked,) = {body for _, body in shop.got}
        assert 1 == len({sent["webhook-id"] for sent, _ in shop.got}), "one message, told again"
        wanted = json.loads(asked)["data"]
        assert ("acme", "1.00", "0.99986") == (wanted["tenant"], wanted["ask"], wanted["balance"])

        pay = ("balance", "topup", "acme", wanted["ask"], "--reference", wanted["reference"])
        assert 0 == run(server, *pay).returncode
        server.kill()  # before the shop hears that it was booked, so it books again
        server.start()
        assert 0 == run(server, *pay).returncode
        other = run(server, "balance", "topup", "acme", "2", "--reference", wanted["reference"])
        assert 1 == other.returncode and "another amount" in other.stderr
        assert "1.99986" == server.told("tenants", "show", "acme")["balance"]
        proof = run(server, "ledger", "verify")
        assert 0 == proof.returncode, proof.stdout + proof.stderr
        server.stop()
    finally:
        server.kill()
    assert {asked} == {body for _, body in shop.got}, "nothing else was asked for"

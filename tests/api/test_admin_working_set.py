"""What the working-set page is told, from a report and a rate card whose answer is known."""

from concurrent.futures import Future

import pytest

from billing.accounts import Accounts
from billing.prices.book import PriceBook
from tests.api import test_money_routes
from tests.api.test_money_routes import House
from tests.support.admin import OPERATOR_TOKEN, admin_client, called, fake_parts
from tiers.telemetry.working_set import MissRatioCurve, TierPoint, TrafficReport
from tiers.tier import TierName

pytestmark = pytest.mark.anyio
house = test_money_routes.house  # the fixture

GIB = 1 << 30
OPERATOR = {"Authorization": f"Bearer {OPERATOR_TOKEN}"}
REPORT = TrafficReport(
    curve=MissRatioCurve((1, 2, 4), (0.4, 0.6, 0.8), 9),
    tiers=(TierPoint(TierName.HOST, 1, 0.4), TierPoint(TierName.DISK, 2, 0.6)),
    num_uses=500,
    num_dropped=0,
    sampled=1.0,
    block_tokens=64,
    block_bytes=GIB,
)
STATS = {
    "model": "m",
    "uptime_s": 60.0,
    "cache": {
        "tiers": {"host": {}, "disk": {"num_blocks": 2, "used_bytes": GIB}},
        "prefill_tokens_per_s": 100.0,
    },
}


def report() -> "Future[TrafficReport]":
    return called(lambda _: REPORT, None)


async def test_advice_is_priced_by_the_card_and_the_measured_traffic(house: House) -> None:
    parts = fake_parts(
        stats=lambda: STATS,
        working_set=report,
        books=house.books,
        gib_month={"disk": 10**11},
        cost_currency=lambda: "EUR",
    )
    async with admin_client(parts) as client:
        told = (await client.get("/admin/api/cache/working-set", headers=OPERATOR)).json()
    month = 2.0 * 30 * 86_400  # the fake history says two tokens a second
    host, disk = told["advice"]
    assert told["ready"]
    assert [GIB, 2 * GIB, 4 * GIB] == told["capacities"]
    assert (9 * GIB, month, 60.0) == (
        told["working_set_bytes"],
        told["tokens_per_month"],
        told["measured_s"],
    )
    # A block takes a GiB in memory and half of one on disk: one more there, two more here.
    assert 0.1 == pytest.approx(host["hit_rate_gain"])
    assert 0.2 == pytest.approx(disk["hit_rate_gain"])
    # The launch card: a miss costs 1 CNY a million, a hit 0.1.
    assert month * 0.2 * 0.9e-6 == pytest.approx(float(disk["worth"].pop("CNY")))
    assert month * 0.2 / 100 == pytest.approx(disk["compute_s"])
    assert ({}, {}, {"EUR": "0.10"}) == (disk["worth"], host["cost"], disk["cost"])


async def test_without_a_card_it_is_worth_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accounts, "book", PriceBook())
    parts = fake_parts(stats=lambda: STATS, working_set=report, books=house.books)
    async with admin_client(parts) as client:
        told = (await client.get("/admin/api/cache/working-set", headers=OPERATOR)).json()
        assert [{}, {}] == [each["worth"] for each in told["advice"]]

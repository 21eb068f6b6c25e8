"""A server before endpoints of its clients' own protocol, and what it has booked."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import orjson

from api.relay.body import TEMPLATE_TOKENS
from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.proof import audit
from tests.api.real_service import served
from tests.support.billing import charges_of
from tests.support.upstream import CACHED, OUTPUT, PROMPT

ALL = {"hit_device": CACHED, "miss": PROMPT - CACHED, "output": OUTPUT}


@asynccontextmanager
async def relaying(folder, *ups, **more):
    """The service and a client of it. At its end nothing is held, and the books are proved."""
    urls = [f"openai+{up.url}" for up in ups]
    async with served(folder, Path("up"), engine_backend=urls, **more) as (service, client):
        yield service, client
        await quiet(service)
        assert [] == audit.verify(service._money.books.store).problems
        assert {0} == {tenant.held for tenant in service._money.accounts.tenants()}
        assert service.core.engine.failure is None


async def quiet(service):
    async with asyncio.timeout(30):
        while service.core.engine.stats().num_running:
            await asyncio.sleep(0.005)


def charges(service, tenant="default"):
    return charges_of(service._money.books.store, tenant)


def usage_of(entry):
    return {name: n for name, n in entry.details.get("usage", {}).items() if n}


def usages(service):
    """Of what was charged, after a check that nothing is held any more."""
    assert 0 == service._money.accounts.tenant("default").held
    return [usage_of(entry) for entry in charges(service)]


def paying(service, units, tenant="acme"):
    """A prepaid tenant with this much; the headers of its key."""
    accounts = service._money.accounts
    accounts.create_tenant(tenant, "CNY", by="test")
    paid = Deposit(tenant, Kind.TOPUP, amount=units, reference="first", by="test")
    service._money.books.ledger.post(paid).result()
    return {"authorization": f"Bearer {accounts.create_key(tenant, by='test')[0]}"}


def bound(**asked):
    """A prompt's tokens at most."""
    return len(orjson.dumps(asked)) + TEMPLATE_TOKENS


def unreported(**asked):
    """The usage of a prompt that nobody tells."""
    return dict.fromkeys(("miss", "unreported"), bound(**asked))

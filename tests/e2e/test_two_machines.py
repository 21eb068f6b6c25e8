"""Two servers as docs/remote.md starts them: one ledger, one set of limits, one store of blocks."""

import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from billing.gate.entries import Kind
from billing.store.opening import open_store
from tests.live_clients import completion, hits_of
from tests.live_server import ForkedServer
from tests.patience import until
from tests.postgres_server import fresh_database
from tests.redis_server import redis_server
from tests.support.billing import booked
from tests.support.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.postgres, pytest.mark.timeout(1800)]

DOCS = Path(__file__).parents[2] / "docs" / "remote.md"
PATIENT = "?socket_timeout=60&socket_connect_timeout=60"  # a busy machine is no store that is down
STORY = "".join(f"Person {n} lives in town {n * 7 % 97}. " for n in range(8))


class Machine(ForkedServer):
    """A server whose ledger is the PostgreSQL that the environment names."""

    @property
    def ledger_url(self):
        return self._environment["CACHESVC_BILLING__DATABASE_URL"]

    def store(self):
        return open_store(self.ledger_url)


class Documented:
    """What the page tells to type: variables of both machines, of each, and what is copied."""

    def __init__(self):
        section = DOCS.read_text().partition("## Two servers by plain commands")[2]
        self._lines = section.partition("```console\n")[2].partition("```")[0].splitlines()

    def _typed(self, where):
        return [line.removeprefix(where) for line in self._lines if line.startswith(where)]

    def exported(self):
        words = " ".join(line.removeprefix("export ") for line in self._typed("$ "))
        return dict(word.split("=", 1) for word in words.split())

    def served(self, machine):
        """The variables before `cachesvc serve --data-dir DIR`."""
        (line,) = (each for each in self._typed(f"{machine}$ ") if " serve " in each)
        told, _, options = line.partition(" cachesvc serve ")
        assert "--data-dir /var/lib/cachesvc" == options
        return dict(word.split("=", 1) for word in told.split())

    def copied(self):
        (line,) = (each for each in self._typed("one$ ") if each.startswith("scp "))
        (names,) = re.findall(r"^scp /var/lib/cachesvc/\{(.+)\} two:/var/lib/cachesvc/$", line)
        return str(names).split(",")


@pytest.fixture
def servers(tmp_path, postgres):
    """Both, and the key of a tenant that both know."""
    save_tiny_model(tmp_path / "demo")
    docs = Documented()
    for name in ("limits", "blocks"):
        (tmp_path / name).mkdir()
    with ExitStack() as stack:
        places = {
            "CACHESVC_BILLING__DATABASE_URL": stack.enter_context(fresh_database(postgres)),
            "CACHESVC_LIMITS__URL": stack.enter_context(redis_server(tmp_path / "limits")),
            "CACHESVC_CACHE__REMOTE_URL": stack.enter_context(redis_server(tmp_path / "blocks"))
            + PATIENT,
        }
        assert places.keys() == docs.exported().keys()
        # A tiny model computes faster than anything loads; and a limit, to see that it is one.
        here = {"CACHESVC_CACHE__WEIGH_LOADS": "false", "CACHESVC_LIMITS__TENANTS": LIMITED}
        machines = []
        for name in ("one", "two"):
            environment = places | docs.served(name) | here
            machine = Machine(tmp_path / name, tmp_path / "demo", **environment)
            machine.data_dir.mkdir(parents=True)
            stack.callback(machine.kill)
            machines.append(machine)
        one, two = machines
        key = one.customer("acme", 10**13)
        one.start()
        for name in docs.copied():
            shutil.copy(one.data_dir / name, two.data_dir / name)
        two.start()
        yield one, two, key


LIMITED = '{"acme": {"requests": 1000}}'


def test_two_servers_share_blocks_a_ledger_and_limits(servers):
    one, two, key = servers
    num_asked = 0

    def ask(machine, prompt=STORY, **more):
        nonlocal num_asked
        num_asked += 1
        return completion(machine.url, "demo", prompt, key, **more)

    first = ask(one, cachesvc={"publish": True}).json()
    second = ask(two).json()
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    tiers = hits_of(second)
    assert tiers["remote"] > 0

    # One count of requests: what one server takes, the other has not any more.
    def left(machine):
        return int(ask(machine, "Hello").headers["x-ratelimit-remaining-requests"])

    until(lambda: left(one) == left(two) + 1)  # unless a new minute has begun between the two

    # One ledger: both servers' charges, in one chain.
    until(lambda: num_asked == len(charges(two)))
    assert tiers["remote"] in {each.details["usage"].get("hit_remote", 0) for each in charges(two)}


def charges(machine):
    entries = booked(machine.ledger_url)
    return [entry for entry in entries if entry.kind is Kind.CHARGE]

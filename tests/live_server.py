"""`cachesvc serve` on a tiny model, as a process of its own, for tests that kill it or load it."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

from billing.accounts import Accounts
from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.ledger import Ledger
from billing.prices.cards import default_card
from billing.store.opening import database_url, open_store
from tests.children import Program
from tests.patience import PATIENCE_S, ended

TAKES_RESERVE = "TESTS_TAKE_THE_RESERVE"  # set by `tests.conftest`
SCRIPT = Path(sys.executable).with_name("cachesvc")
READY = re.compile(r"serves \S+ on (http://[^\s\"]+)")


def room_in(folder):
    """What lets a program use the last of the disk that tests use, if it is that of `folder`."""
    folder = next(each for each in (folder, *folder.parents) if each.exists())
    usual = Path(tempfile.gettempdir()).stat().st_dev
    takes = TAKES_RESERVE in os.environ and usual == folder.stat().st_dev
    return {"CACHESVC_CACHE__DISK_RESERVE_BYTES": "0"} if takes else {}


@contextmanager
def serve(log, *arguments, **environment):
    """A running `cachesvc serve` on a free port, and its URL; ended, if the test has not, by
    SIGKILL."""
    env = {**os.environ, **room_in(log.parent), **environment}
    with log.open("w") as out:
        command = [SCRIPT, "serve", "--port", "0", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := READY.search(log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


class LiveServer:
    """A server on `folder/data`, started and ended as often as a test wants."""

    start_s: float = PATIENCE_S
    sizes: Sequence[str] = (
        *("--device-cache", "8MiB", "--host-cache", "8MiB", "--disk-cache", "16MiB"),
        *("--block-size", "16"),
    )
    more: Sequence[str] = ()  # arguments; of an option that comes twice, the second counts

    def __init__(self, folder, model, **environment):
        self.data_dir = folder / "data"
        self._log = folder / "serve.log"
        self._model = model
        self._environment = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
        self._process = None
        self.url = ""

    def start(self):
        """Start it and wait until it serves; gives its URL."""
        self._log.write_bytes(b"")
        self._process = self.begin()
        deadline = time.monotonic() + self.start_s
        while not (found := READY.search(self.log)):
            assert self._process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.02)
        self.url = found[1]
        return self.url

    def begin(self):
        """Its process, beside the model's folder: a folder is served under the name it is given
        by."""
        where, env = self._model.parent, room_in(self.data_dir.parent) | self._environment
        with self._log.open("ab") as out:
            return subprocess.Popen(self.command(), cwd=where, stdout=out, stderr=out, env=env)

    def command(self):
        """How it is started, beside the model's folder."""
        where = ("--model", self._model.name, "--port", "0", "--data-dir", self.data_dir)
        return [SCRIPT, "serve", *where, *self.sizes, *self.more]

    @property
    def log(self):
        return self._log.read_text()

    @property
    def pid(self):
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self):
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def kill(self):
        """SIGKILL: nothing is flushed, nobody is told."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self):
        """SIGTERM, and the exit code that a clean end has."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(self.start_s) == 0, self.log

    def wait(self):
        """The exit code of a server that ends by itself."""
        assert self._process is not None
        return self._process.wait(self.start_s)

    def store(self):
        """Its ledger, opened beside it."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        return open_store(database_url(self.data_dir))

    def customer(self, tenant, units):
        """A prepaid tenant with so much; the header that its key makes."""
        store = self.store()
        accounts = Accounts(store)
        ledger = Ledger(store, accounts, owner="test", first_card=default_card())
        ledger.start()
        try:
            accounts.create_tenant(tenant, "CNY", by="test")
            ledger.post(
                Deposit(tenant, Kind.TOPUP, amount=units, reference="first", by="test")
            ).result()
            key, _ = accounts.create_key(tenant, by="test")
        finally:
            ledger.close()
            store.close()
        return {"Authorization": f"Bearer {key}"}

    def told(self, *arguments):
        """What a command prints with --json for this data directory."""
        command = [SCRIPT, *arguments, "--json", "--data-dir", self.data_dir]
        done = ended(*command, timeout=self.start_s)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


class ForkedServer(LiveServer):
    """One that need not import what it needs. For tests of what a server does once it serves."""

    def begin(self):
        _, *arguments = map(str, self.command())
        env = room_in(self.data_dir.parent) | self._environment
        return Program(arguments, cwd=self._model.parent, env=env, log=self._log)

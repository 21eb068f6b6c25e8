"""A private PostgreSQL in a temporary folder, for the tests that run on both stores.

Uses `CACHESVC_TEST_POSTGRES_URL` where it is set, else `initdb` and `postgres` of this machine.
Where neither is there the tests are skipped, and fail with CI=true.
"""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from tests.patience import PATIENCE_S

URL_VARIABLE = "CACHESVC_TEST_POSTGRES_URL"


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a server's maintenance database."""
    given = os.environ.get(URL_VARIABLE)
    if given:
        yield given
        return
    initdb, postgres = shutil.which("initdb"), shutil.which("postgres")
    if not initdb or not postgres:
        reason = f"no initdb and postgres in PATH, and {URL_VARIABLE} is not set"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    yield from _run(initdb, postgres)


def _run(initdb: str, postgres: str) -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="cachesvc-pg-"))
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    owner = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
    if user:
        os.chown(folder, user.pw_uid, user.pw_gid)
    data = folder / "data"
    try:
        make = [initdb, "-D", str(data), "-A", "trust", "-U", "ledger", "-E", "UTF8", "--no-locale"]
        subprocess.run([*make, "--no-sync"], check=True, capture_output=True, cwd=folder, **owner)
        port = _free_port()
        serve = [postgres, "-D", str(data), "-h", "127.0.0.1", "-p", str(port), "-k", str(folder)]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [*serve, "-c", "fsync=off"], stdout=log, stderr=log, cwd=folder, **owner
            )
        try:
            url = f"postgresql+psycopg://ledger@127.0.0.1:{port}/postgres"
            _wait(url, server, folder / "log")
            yield url
        finally:
            server.terminate()
            server.wait(20)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    engine = create_engine(url)
    try:
        while True:
            try:
                with engine.connect():
                    return
            except OperationalError:
                if server.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"PostgreSQL did not start: {log.read_text()[-2000:]}")
                time.sleep(0.05)
    finally:
        engine.dispose()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def fresh_database(server_url: str, copied: str = "template1") -> Iterator[str]:
    """A new database on the server, dropped afterwards. `copied`: the name of one that it begins
    as, to which nobody is connected."""
    name = f"ledger_{uuid.uuid4().hex[:12]}"
    engine = create_engine(server_url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {copied}"))
        yield server_url.rsplit("/", 1)[0] + f"/{name}"
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    finally:
        engine.dispose()

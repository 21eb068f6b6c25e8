"""A private PostgreSQL in a temporary folder, for the tests that run on both stores.

Uses `CACHESVC_TEST_POSTGRES_URL` where it is set, else `initdb` and `postgres` of this machine.
Where neither is there the tests are skipped, and fail with CI=true.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from tests.patience import free_port, installed, until_ready

URL_VARIABLE = "CACHESVC_TEST_POSTGRES_URL"


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a server's maintenance database."""
    given = os.environ.get(URL_VARIABLE)
    if given:
        yield given
        return
    yield from _run(installed("initdb"), installed("postgres"))


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
        port = free_port()
        serve = [postgres, "-D", str(data), "-h", "127.0.0.1", "-p", str(port), "-k", str(folder)]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [*serve, "-c", "fsync=off"], stdout=log, stderr=log, cwd=folder, **owner
            )
        try:
            url = f"postgresql+psycopg://ledger@127.0.0.1:{port}/postgres"
            engine = create_engine(url)
            until_ready(lambda: engine.connect().close(), server, folder / "log", OperationalError)
            engine.dispose()
            yield url
        finally:
            server.terminate()
            server.wait(20)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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

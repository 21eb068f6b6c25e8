"""`cachesvc admin` without a running server: passwords, their list, and what is refused."""

import json
import stat
from pathlib import Path

from typer.testing import CliRunner, Result

from api.admin.login.passwords import Passwords
from api.admin.login.sessions import Admin, Role
from billing.accounts import Accounts
from billing.store.opening import database_url, open_store
from cachesvc.cli import app

SECRET = "five words that no one says"


def run(data_dir: Path, *args: str, told: str | None = None) -> Result:
    return CliRunner().invoke(app, ["admin", *args, "--data-dir", str(data_dir)], input=told)


def test_a_password_is_set_listed_and_taken_away_and_each_change_is_audited(
    tmp_path: Path,
) -> None:
    data_dir = tmp_path / "data"
    given = run(data_dir, "password", "bob", "--role", "reader", told=f"{SECRET}\n")
    assert 0 == given.exit_code, given.output
    assert SECRET not in given.output
    assert 0o700 == stat.S_IMODE(data_dir.stat().st_mode)
    assert Admin("bob", Role.READER) == Passwords(data_dir).verify("bob", SECRET)
    assert [{"name": "bob", "role": "reader"}] == json.loads(
        run(data_dir, "password", "--list", "--json").stdout
    )
    assert 0 == run(data_dir, "password", "bob", "--remove", "--reason", "left").exit_code
    assert Passwords(data_dir).verify("bob", SECRET) is None
    store = open_store(database_url(data_dir))
    trail = Accounts(store).trail.newest()
    store.close()
    assert [("admin.remove", "left"), ("admin.password", "no reason given")] == [
        (entry["action"], entry["reason"]) for entry in trail
    ]
    assert all(SECRET not in str(entry) and "argon2" not in str(entry) for entry in trail)


def test_what_cannot_be_done_is_said_in_a_sentence(tmp_path: Path) -> None:
    short = run(tmp_path, "password", told="short\n")
    assert (1, True) == (short.exit_code, "12 to 1024" in short.output)
    nobody = run(tmp_path, "password", "eve", "--remove")
    assert (1, True) == (nobody.exit_code, "'eve' has no password" in nobody.output)
    unserved = run(tmp_path, "link")
    assert (1, True) == (unserved.exit_code, "cachesvc serve" in unserved.output)

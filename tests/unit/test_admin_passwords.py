"""Passwords of admins: how they are kept, changed and taken away, by the server and by `cachesvc
admin`; and the files that pages need."""

import json
import stat
from pathlib import Path

import pytest
from argon2 import extract_parameters
from argon2.exceptions import VerifyMismatchError
from typer.testing import CliRunner, Result

from api.admin.login import passwords as passwords_module
from api.admin.login.passwords import FILE_NAME, Passwords
from api.admin.login.sessions import Admin, Role
from api.admin.pages import assets
from api.errors import InvalidRequest
from billing.accounts import Accounts
from billing.errors import InvalidName
from billing.store.opening import database_url, open_store
from cachesvc.cli import app

SECRET = "five words that no one says"


def test_a_password_is_kept_hashed_and_for_the_owner_alone(tmp_path):
    Passwords(tmp_path).set("ada", SECRET, Role.READER)
    path = tmp_path / FILE_NAME
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert "$argon2id$" in path.read_text()
    assert SECRET not in path.read_text()
    assert [path] == list(tmp_path.iterdir())
    assert Admin("ada", Role.READER) == Passwords(tmp_path).verify("ada", SECRET)


def test_a_change_made_by_another_process_holds_at_once(tmp_path):
    server, command = Passwords(tmp_path), Passwords(tmp_path)
    assert server.verify("ada", SECRET) is None
    command.set("ada", SECRET, Role.ADMIN)
    assert Admin("ada") == server.verify("ada", SECRET)
    command.set("ada", SECRET + "!", Role.ADMIN)
    assert server.verify("ada", SECRET) is None
    assert command.remove("ada")
    assert not command.remove("ada")
    assert {} == server.roles()
    assert server.verify("ada", SECRET + "!") is None


def test_an_unknown_name_costs_a_whole_check_and_a_start_computes_none(tmp_path, monkeypatch):
    hasher = passwords_module._hasher
    known = extract_parameters(hasher.hash(SECRET))
    checked: list[str] = []

    class Watched:
        def verify(self, hashed: str, password: str) -> None:
            checked.append(hashed)
            with pytest.raises(VerifyMismatchError) as refused:  # an invalid hash costs nothing
                hasher.verify(hashed, password)
            raise refused.value

    with monkeypatch.context() as start:
        start.setattr(type(hasher), "hash", None)  # not called
        passwords = Passwords(tmp_path)
    monkeypatch.setattr(passwords_module, "_hasher", Watched())
    assert passwords.verify("nobody", SECRET) is None
    assert [known] == [extract_parameters(each) for each in checked]


def test_weak_passwords_and_odd_names_are_refused(tmp_path):
    passwords = Passwords(tmp_path)
    with pytest.raises(InvalidRequest, match="12 to 1024"):
        passwords.set("ada", "x" * 1025, Role.ADMIN)
    with pytest.raises(InvalidName):
        passwords.set("../ada", SECRET, Role.ADMIN)


@pytest.mark.parametrize(
    "text", ["", "garbage", "[]", '{"ada": {}}', '{"ada": {"role": "x", "hash": ""}}']
)
def test_a_damaged_file_is_named_and_lets_nobody_in(tmp_path, text, caplog):
    (tmp_path / FILE_NAME).write_text(text)
    assert Passwords(tmp_path).verify("ada", SECRET) is None
    assert f"{FILE_NAME} is damaged" in caplog.text
    told = run(tmp_path, "password", "--list")
    assert (1, True) == (told.exit_code, "is damaged: restore it from a copy" in told.stderr)
    with pytest.raises(InvalidRequest, match="is damaged"):
        Passwords(tmp_path).set("ada", SECRET, Role.ADMIN)


def run(data_dir: Path, *args: str, told: str | None = None) -> Result:
    return CliRunner().invoke(app, ["admin", *args, "--data-dir", str(data_dir)], input=told)


def test_a_password_is_set_listed_and_taken_away_and_each_change_is_audited(tmp_path):
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


def test_what_cannot_be_done_is_said_in_a_sentence(tmp_path):
    short = run(tmp_path, "password", told="short\n")
    assert (1, True) == (short.exit_code, "12 to 1024" in short.output)
    nobody = run(tmp_path, "password", "eve", "--remove")
    assert (1, True) == (nobody.exit_code, "'eve' has no password" in nobody.output)
    unserved = run(tmp_path, "link")
    assert (1, True) == (unserved.exit_code, "cachesvc serve" in unserved.output)


def test_only_the_reviewed_files_of_packages_are_served():
    wanted = assets.VENDORED["uplot.js"]
    assert assets._vendored(wanted)
    with pytest.raises(assets.AssetMissing, match="not the file that was reviewed"):
        assets._vendored(wanted._replace(digest="0" * 64))
    with pytest.raises(assets.AssetMissing, match="make setup"):
        assets._vendored(wanted._replace(package="no_such_package"))


def test_every_asset_has_a_type_and_fits_the_budget():
    files = assets.assets()
    assert [] == [name for name in files if Path(name).suffix not in assets.TYPES]
    assert sum(len(each.packed) for each in files.values()) < 80_000

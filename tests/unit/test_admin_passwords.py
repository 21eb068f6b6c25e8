"""Passwords of admins: how they are kept, changed and taken away; and the files that pages need."""

import dataclasses
import stat
from pathlib import Path

import pytest
from argon2 import extract_parameters
from argon2.exceptions import VerifyMismatchError
from typer.testing import CliRunner

from api.admin.login import passwords as passwords_module
from api.admin.login.passwords import FILE_NAME, Passwords
from api.admin.login.sessions import Admin, Role
from api.admin.pages import assets
from api.errors import InvalidRequest
from billing.errors import InvalidName
from cachesvc.cli import app

SECRET = "five words that no one says"


def test_a_password_is_kept_hashed_and_for_the_owner_alone(tmp_path: Path) -> None:
    Passwords(tmp_path).set("ada", SECRET, Role.READER)
    path = tmp_path / FILE_NAME
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert "$argon2id$" in path.read_text()
    assert SECRET not in path.read_text()
    assert [path] == list(tmp_path.iterdir())
    assert Admin("ada", Role.READER) == Passwords(tmp_path).verify("ada", SECRET)


def test_a_change_made_by_another_process_holds_at_once(tmp_path: Path) -> None:
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


def test_an_unknown_name_costs_a_whole_check_and_a_start_computes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_weak_passwords_and_odd_names_are_refused(tmp_path: Path) -> None:
    passwords = Passwords(tmp_path)
    with pytest.raises(InvalidRequest, match="12 to 1024"):
        passwords.set("ada", "short", Role.ADMIN)
    with pytest.raises(InvalidName):
        passwords.set("../ada", SECRET, Role.ADMIN)


@pytest.mark.parametrize(
    "text", ["", "garbage", "[]", '{"ada": {}}', '{"ada": {"role": "x", "hash": ""}}']
)
def test_a_damaged_file_is_named_and_lets_nobody_in(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert Passwords(tmp_path).verify("ada", SECRET) is None
    assert f"{FILE_NAME} is damaged" in caplog.text
    told = CliRunner().invoke(app, ["admin", "password", "--list", "--data-dir", str(tmp_path)])
    assert (1, True) == (told.exit_code, "is damaged: restore it from a copy" in told.stderr)
    with pytest.raises(InvalidRequest, match="is damaged"):
        Passwords(tmp_path).set("ada", SECRET, Role.ADMIN)


def test_only_the_reviewed_files_of_packages_are_served() -> None:
    wanted = assets.VENDORED["uplot.js"]
    assert assets._vendored(wanted)
    with pytest.raises(assets.AssetMissing, match="not the file that was reviewed"):
        assets._vendored(wanted._replace(digest="0" * 64))
    with pytest.raises(assets.AssetMissing, match="make setup"):
        assets._vendored(wanted._replace(package="no_such_package"))


def test_every_asset_has_a_type_and_fits_the_budget() -> None:
    files = assets.ASSETS.files
    assert [] == [name for name in files if Path(name).suffix not in assets.TYPES]
    assert sum(len(each.packed) for each in files.values()) < 80_000
    assert dataclasses.is_dataclass(next(iter(files.values())))

"""`cachesvc doctor`: each check on a machine in order and on one that is not."""

import json
from pathlib import Path

from typer.testing import CliRunner

from cachesvc.cli import app, doctor
from cachesvc.cli.doctor import Level
from cachesvc.config import places
from cachesvc.config.places import disk_path
from cachesvc.server.listen import make_data_dir
from tiers.disk.directory import DirectoryLock

HERE = Path(__file__).parents[2]


def test_this_machine_passes(tmp_path):
    called = CliRunner().invoke(app, ["doctor", "--data-dir", str(tmp_path), "--json"])
    told = json.loads(called.stdout)
    assert [] == [finding for finding in told if finding["level"] == "error"]
    assert 0 == called.exit_code
    checks = {finding["check"] for finding in told}
    assert {"layout", "versions", "gpu", "memory", "disk", "data directory"} <= checks


def test_packages_in_two_folders_are_an_error():
    ours = {name: HERE / name for name in doctor.PACKAGES}
    assert doctor.check_layout(ours).level is Level.OK
    theirs = doctor.check_layout(ours | {"api": Path("/elsewhere/api")})
    assert theirs.level is Level.ERROR
    assert "/elsewhere/api" in theirs.message
    assert "environment" in theirs.fix
    missing = doctor.check_layout(ours | {"tiers": None})
    assert missing.level is Level.ERROR
    assert "tiers" in missing.message


def test_a_broken_layout_fails_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_folder", lambda name: tmp_path / name / "x")
    called = CliRunner().invoke(app, ["doctor", "--data-dir", str(tmp_path)])
    assert 1 == called.exit_code
    assert "fix:" in called.stdout


def test_a_data_directory_that_is_served_or_is_none_is_named(tmp_path):
    absent, file, path = tmp_path / "mistyped", tmp_path / "file", disk_path(tmp_path)
    path.mkdir(parents=True)
    lock = DirectoryLock(path)
    try:
        assert "served by pid" in doctor.check_lock(tmp_path).message
    finally:
        lock.release()
    assert f"{absent} does not exist yet; a start makes it" == doctor.check_lock(absent).message
    file.touch()
    assert doctor.check_lock(file).level is Level.ERROR
    assert f"{file} is a file" == doctor.check_lock(file).message


def test_a_network_file_system_is_an_error(tmp_path, monkeypatch, caplog):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(places, "MOUNTS", mounts)
    assert "nfs4" == places.file_system(tmp_path / "data")
    assert "ext4" == places.file_system(Path("/usr"))
    found = {each.check: each for each in doctor.check_disk(tmp_path)}
    assert found["file system"].level is Level.ERROR
    make_data_dir(tmp_path)
    assert "is on nfs4: a command on another machine would damage the ledger" in caplog.text


def test_a_full_disk_is_an_error_because_the_ledger_is_there(tmp_path, monkeypatch):
    for free, level, what in (
        (100 << 10, Level.ERROR, "a ledger in SQLite there refuses every request"),
        (100 << 20, Level.WARNING, "lower --disk-cache to what it may hold"),
        (100 << 30, Level.OK, ""),
    ):
        usage = (1 << 40, 0, free)
        monkeypatch.setattr("cachesvc.cli.doctor.shutil.disk_usage", lambda _, usage=usage: usage)
        found = {each.check: each for each in doctor.check_disk(tmp_path)}["disk"]
        assert level is found.level
        assert what in found.fix

"""`cachesvc doctor`: each check on a machine in order and on one that is not."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cachesvc.cli import app, doctor
from cachesvc.cli.doctor import Level
from cachesvc.config import places
from cachesvc.config.places import disk_path
from cachesvc.config.sections import CacheSection
from cachesvc.server.listen import make_data_dir
from engine.hardware import Hardware
from tiers.disk.directory import DirectoryLock

HERE = Path(__file__).parents[2]


def test_this_machine_passes(tmp_path):
    called = CliRunner().invoke(app, ["doctor", "--data-dir", str(tmp_path), "--json"])
    told = json.loads(called.stdout)
    assert [] == [finding for finding in told if finding["level"] == "error"]
    assert 0 == called.exit_code
    checks = {finding["check"] for finding in told}
    assert {"layout", "versions", "gpu", "threads", "disk", "clock", "limits"} <= checks


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


def test_clock_open_files_and_threads_are_checked():
    assert doctor.check_clock(0).level is Level.ERROR
    assert doctor.check_clock(doctor.EARLIEST_S + 1).level is Level.OK
    (finding,) = doctor.check_limits(256, 4096)
    assert finding.level is Level.WARNING
    assert "ulimit -n 4096" in finding.fix
    found = {each.check: each for each in doctor.check_compute(Hardware(10_000, "AVX2"))}
    assert found["threads"].level is Level.WARNING
    assert "OMP_NUM_THREADS" in found["threads"].fix


def test_a_small_host_tier_beside_a_large_gpu_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "memory_limit", lambda: None)

    def found(gpu_gib: int, available_gib: int, **cache: int) -> list[str]:
        monkeypatch.setattr(doctor, "available_bytes", lambda: available_gib << 30)
        findings = doctor.check_host_tier(CacheSection(**cache), gpu_gib << 30)
        return [each.fix for each in findings]

    assert ["--host-cache 64GiB, half of the memory available"] == found(79, 129)
    assert [] == found(0, 129), "there is no GPU"
    assert [] == found(79, 16), "nor is there memory"
    assert [] == found(79, 129, host_bytes=32 << 30)
    assert [] == found(79, 129, host_bytes=0), "it is turned off"
    assert [] == found(79, 129, device_bytes=4 << 30)


def test_a_data_directory_that_is_served_or_is_none_is_named(tmp_path):
    absent, file, path = tmp_path / "mistyped", tmp_path / "file", disk_path(tmp_path)
    path.mkdir(parents=True)
    lock = DirectoryLock(path)
    try:
        assert "served by pid" in doctor.check_lock(tmp_path).message
    finally:
        lock.release()
    assert f"{absent} does not exist yet; a start makes it" == doctor.check_lock(absent).message
    assert f"a start makes {absent} for its owner alone" == doctor.check_privacy(absent).message
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


def test_files_that_others_may_read_are_a_warning(tmp_path):
    ledger = tmp_path / "ledger.sqlite3"
    ledger.touch()
    ledger.chmod(0o644)
    tmp_path.chmod(0o755)
    found = doctor.check_privacy(tmp_path)
    assert (Level.WARNING, f"chmod -R go= {tmp_path}") == (found.level, found.fix)
    ledger.chmod(0o600)
    assert doctor.check_privacy(tmp_path).level is Level.OK
    ledger.chmod(0o644)
    tmp_path.chmod(0o700)
    assert doctor.check_privacy(tmp_path).level is Level.OK


@pytest.mark.parametrize("gpu", [None, "NVIDIA H100"])
def test_a_machine_without_a_cpp_compiler_is_a_warning(monkeypatch, gpu):
    """A GPU needs it for the records of the disk, a CPU for its tokens as well."""
    monkeypatch.setattr("engine.operators.library.find_compiler", lambda: None)
    hardware = Hardware(1, "AVX2", gpu)
    [found] = [each for each in doctor.check_compute(hardware) if each.check == "C++ compiler"]
    assert (Level.WARNING, "install one, on Debian `apt-get install g++`") == (
        found.level,
        found.fix,
    )
    assert "records of the disk" in found.message
    assert (gpu is None) == ("a token" in found.message)
    for instructions in ("AVX2", "AVX512"):
        found = doctor.check_operators("/usr/bin/c++", instructions, on_gpu=bool(gpu))
        assert (Level.OK, "/usr/bin/c++") == (found.level, found.message)
    found = doctor.check_operators("/usr/bin/c++", "DEFAULT", on_gpu=bool(gpu))
    assert found.level is Level.WARNING and "AVX2" in found.fix
    assert "records of the disk" in found.message, "there are no operators, with any compiler"


def test_a_gpu_without_a_c_compiler_or_headers_is_a_warning(tmp_path):
    header = tmp_path / "Python.h"
    lacking_both = doctor.check_compiler(None, header)
    lacking_headers = doctor.check_compiler("/usr/bin/gcc", header)
    header.touch()
    lacking_compiler = doctor.check_compiler(None, header)
    for finding in (lacking_both, lacking_headers, lacking_compiler):
        assert finding.level is Level.WARNING
        assert "apt-get install gcc" in finding.fix
    assert str(header) in lacking_both.message and str(header) in lacking_headers.message
    assert str(header) not in lacking_compiler.message
    assert doctor.check_compiler("/usr/bin/gcc", header).level is Level.OK

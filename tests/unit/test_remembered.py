"""What the dashboard keeps over a restart: in which bounds, from whom, and what a fault costs."""

import os
import pickle
import sqlite3
import zlib
from array import array
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from api.admin.login.sessions import Admin, Role, Sessions
from api.job import Bill, Served
from api.journal.journal import Journal, JournalSettings, RequestRecord, State
from billing.gate.outcomes import Outcome
from billing.usage import Usage
from cachesvc.server.state_file import FILE_NAME
from engine.request import FinishReason, Timeline
from tests.support.state import FiledRemembered
from tiers.blocks.keys import PrefixKey
from tiers.errors import MissReason


def record(number: int) -> RequestRecord:
    served = Served(
        Outcome.FINISHED,
        Usage(hit_disk=4, miss=3, output=2),
        {MissReason.ABSENT: 3},
        Timeline(1, 2, 3, 4, 5),
        finishes=(FinishReason.STOP,),
    )
    return RequestRecord(
        request_id=f"r{number}",
        client_id="",
        tenant="acme",
        project="",
        key_id="",
        session="",
        model="tiny",
        stream=False,
        num_choices=1,
        prompt_tokens=7,
        scope=PrefixKey(b"s" * 16),
        arrived_s=1000.0 + number,
        state=State.FINISHED,
        served=served,
        bill=Bill(served.usage, "CNY", "0.1", "0.2"),
        ended_s=1001.0 + number,
    )


def kept(path: Path, *records: RequestRecord, max_records: int = 100) -> list[RequestRecord]:
    """What is remembered of these after a restart."""
    first = FiledRemembered(path, max_records=max_records)
    first.start()
    for each in records:
        first.keep_record(each)
    first.close()
    return list(FiledRemembered(path, max_records=max_records).records())


def test_requests_are_there_after_a_restart_the_newest_of_them(tmp_path):
    path = tmp_path / FILE_NAME
    assert [record(1), record(2)] == kept(path, record(1), record(2))
    assert [record(2), record(3)] == kept(path, record(3), max_records=2)
    assert 0o600 == path.stat().st_mode & 0o777
    journal = Journal(JournalSettings(max_requests=10))
    journal.restore([record(2), record(3)])
    assert ["r3", "r2"] == [each.request_id for each in journal.newest()]
    assert record(2) == journal.find("r2", tenant="acme")


def test_a_record_of_a_version_that_knew_fewer_fields_is_omitted(tmp_path, monkeypatch):
    known = [field.name for field in fields(RequestRecord)][:-1]
    monkeypatch.setattr(
        RequestRecord, "__getstate__", lambda self: [getattr(self, name) for name in known]
    )
    assert [] == kept(tmp_path / FILE_NAME, record(1))


def test_prompts_are_never_written(tmp_path):
    from dataclasses import replace

    (found,) = kept(tmp_path / FILE_NAME, replace(record(1), prompts=(array("i", [1, 2]),)))
    assert () == found.prompts


@pytest.mark.parametrize("held", [b"", b"no database at all" * 500])
def test_a_damaged_file_is_begun_anew(tmp_path, held):
    path = tmp_path / FILE_NAME
    path.write_bytes(held)
    copy = path.with_name(f"{FILE_NAME}.monday")
    copy.touch()
    assert [record(1)] == kept(path, record(1))
    assert copy.exists(), "what an operator has kept beside it stays"


def test_another_versions_file_is_begun_anew(tmp_path):
    path = tmp_path / FILE_NAME
    kept(path, record(1))
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert [record(2)] == kept(path, record(2))


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch owned",)


@pytest.mark.parametrize("body", [pickle.dumps(_Evil()), pickle.dumps([1]), b"\x80", b""])
def test_what_is_no_record_is_left_out_and_runs_nothing(tmp_path, body, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / FILE_NAME
    kept(path, record(1))
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO records (body) VALUES (?)", (zlib.compress(body),))
        connection.execute("INSERT INTO records (body) VALUES (?)", (body,))
    connection.close()
    assert [record(1)] == list(FiledRemembered(path, max_records=9).records())
    assert not (tmp_path / "owned").exists()


def test_a_file_that_cannot_be_written_costs_the_memory_only(tmp_path, caplog):
    path = tmp_path / "nowhere" / FILE_NAME
    assert [] == kept(path, record(1), record(2))
    assert 2 == caplog.text.count("will not be remembered over a restart"), "once a start"


def test_a_file_that_cannot_be_opened_is_left_as_it_is(tmp_path, caplog, monkeypatch):
    path = tmp_path / FILE_NAME
    assert [record(1)] == kept(path, record(1))
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, timeout: connect(path, timeout=0))
    with closing(connect(path)) as other:  # a copy is being made, say
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        assert [] == kept(path, record(2))
    assert f"{path}: database is locked" in caplog.text
    assert [record(1), record(3)] == kept(path, record(3))
    path.unlink()
    path.mkdir()
    assert [] == kept(path, record(4))
    assert path.is_dir()


def test_states_are_kept_by_name_and_the_last_one_counts(tmp_path):
    first = FiledRemembered(tmp_path / FILE_NAME, max_records=9)
    assert first.read("sessions") is None
    first.start()
    for body in (b"one", b"two"):
        first.keep("sessions", body)
    first.close()
    assert b"two" == FiledRemembered(tmp_path / FILE_NAME, max_records=9).read("sessions")


def test_a_login_outlives_a_restart_and_no_longer_than_it_would_have():
    before = Sessions(lifetime_s=100, idle_s=30, clock_s=lambda: 5_000.0)
    token, session = before.open(Admin("ada", Role.READER, key_id="k1"))
    now = [7.0]  # a clock that began anew
    for wall_s, found in ((1_010.0, True), (1_029.0, True), (1_031.0, False), (1_101.0, False)):
        after = Sessions(lifetime_s=100, idle_s=30, clock_s=lambda: now[0])
        after.restore(before.dump(1_000.0), wall_s)
        again = after.find(token)
        assert found == (again is not None), wall_s
        if again is not None:
            assert (session.admin, session.csrf_token) == (again.admin, again.csrf_token)
    set_back = Sessions(lifetime_s=100, idle_s=30, clock_s=lambda: now[0])
    set_back.restore(before.dump(1_000.0), -50_000.0)
    assert set_back.find(token) is not None
    now[0] += 101
    assert set_back.find(token) is None
    with pytest.raises(ValueError, match="no sessions"):
        set_back.restore(b'[{"name": "eve"}]', 1_000.0)
    assert token.encode() not in before.dump(1_000.0)

"""What the dashboard keeps over a restart: in which bounds, from whom, and what a fault costs."""

import os
import pickle
import sqlite3
import zlib
from array import array
from contextlib import closing
from dataclasses import fields

import pytest

from api.job import Bill, Served
from api.journal.journal import Journal, JournalSettings, RequestRecord, State
from billing.gate.outcomes import Outcome
from billing.usage import Usage
from cachesvc.server.state_file import FILE_NAME
from engine.request import FinishReason, Timeline
from tests.support.state import FiledRemembered
from tiers.blocks.keys import PrefixKey
from tiers.errors import MissReason


def record(number):
    served = Served(
        Outcome.FINISHED,
        Usage(hit_disk=4, miss=3, output=2),
        {MissReason.ABSENT: 3},
        Timeline(1, 2, 3, 4, 5),
        finishes=(FinishReason.STOP,),
    )
    empty = dict.fromkeys(("client_id", "project", "key_id", "session"), "")
    asked = {"request_id": f"r{number}", "tenant": "acme", "model": "tiny", "stream": False}
    asked |= {"num_choices": 1, "prompt_tokens": 7, "scope": PrefixKey(b"s" * 16)}
    ended = {"arrived_s": 1000.0 + number, "ended_s": 1001.0 + number, "state": State.FINISHED}
    bill = Bill(served.usage, "CNY", "0.1", "0.2")
    return RequestRecord(**empty, **asked, **ended, served=served, bill=bill)


def kept(path, *records, max_records=100):
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
    def __reduce__(self):
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

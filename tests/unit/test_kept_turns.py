"""Turns and responses over a restart: whose they are, in which bounds, and what a fault costs."""

import asyncio
import sqlite3
import threading
import zlib
from array import array
from contextlib import closing

import pytest

from api.job import Transcript
from api.requests.kept import owner_of
from api.requests.responses import KeptResponse, StoredResponses
from api.requests.turns import Conversations, turn_of
from cachesvc.server.kept_turns import forget_stored
from cachesvc.server.state_file import FILE_NAME
from tests.support.disks import Clock
from tests.support.state import FiledTurns
from tests.support.wire import ByteTokenizer
from tiers.blocks.keys import CacheScope
from tiers.errors import PurgeFailed

OWNER, OTHER = owner_of(b"a"), owner_of(b"b")
TURN = [{"role": "user", "content": "hi"}]
ANSWERED = [*TURN, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]


def opened(folder, clock=None, max_bytes=1 << 20):
    turns = FiledTurns(
        folder / FILE_NAME, max_bytes=max_bytes, max_age_s=1000, clock=clock or Clock()
    )
    turns.start()
    return turns


def rows(folder, query, values=()):
    with closing(sqlite3.connect(folder / FILE_NAME)) as db, db:
        return db.execute(query, values).fetchall()


async def test_what_was_deleted_is_gone_after_a_restart(tmp_path):
    turns = opened(tmp_path)
    turns.write(b"one", OWNER, b"body")
    turns.close()
    turns = opened(tmp_path)
    turns.delete(b"one")
    turns.close()
    turns = opened(tmp_path)
    assert b"one" not in turns
    turns.close()


async def test_the_file_is_bounded_by_bytes_and_by_age(tmp_path):
    """The least recently used leave first."""
    clock = Clock()
    turns = opened(tmp_path, clock, max_bytes=2000)
    for number in range(64):
        clock.now_s += 1
        turns.write(b"%d" % number, OWNER, bytes(array("i", range(number, number + 200))))
    turns.close()
    turns = opened(tmp_path, clock, max_bytes=2000)
    turns.close()
    assert b"63" in turns
    assert b"0" not in turns
    assert rows(tmp_path, "SELECT sum(size) FROM kept")[0][0] <= 2000
    clock.now_s += 1001
    turns = opened(tmp_path, clock)
    assert b"63" not in turns
    turns.close()


async def test_the_names_in_memory_are_bounded_whatever_becomes_of_the_file(tmp_path):
    """They took 400 bytes of each chat, and nothing of where no file is written ever left."""

    def few(folder):
        return FiledTurns(folder / FILE_NAME, max_entries=4, clock=Clock())

    turns = few(tmp_path)
    turns.start()
    for number in range(4):
        turns.write(b"%d" % number, OWNER, b"body")
    turns.write(b"0", OWNER, b"again")  # used since
    turns.write(b"4", OWNER, b"body")
    assert [True, False, True] == [name in turns for name in (b"0", b"1", b"2")]
    turns.close()
    assert [(4,)] == rows(tmp_path, "SELECT count(*) FROM kept")
    for number in range(1_699_999_990, 1_700_000_000):
        old = (b"old%d" % number, OWNER, number)
        rows(tmp_path, "INSERT INTO kept VALUES (?, ?, ?, 1, x'00')", old)
    turns = few(tmp_path)
    assert 4 == len(turns._owners) and b"4" in turns and b"old1699999990" not in turns
    turns.start()
    turns.close()
    assert [(4,)] == rows(tmp_path, "SELECT count(*) FROM kept")
    nowhere = few(tmp_path / "no" / "such")
    for number in range(10):
        nowhere.write(b"%d" % number, OWNER, b"body")
    assert 4 == len(nowhere._owners)
    assert None is await nowhere.read(b"9")


@pytest.mark.parametrize("bound", ["max_bytes", "max_entries"])
async def test_one_tenant_does_not_take_the_place_of_the_others(tmp_path, bound):
    """What it writes beyond the bound costs it its own, though others' were used longer ago."""
    bounds = {"max_bytes": 1 << 30, "max_entries": 1000, bound: 2000 if bound == "max_bytes" else 9}
    clock = Clock()

    def full():
        turns = FiledTurns(tmp_path / FILE_NAME, clock=clock, **bounds)
        turns.start()
        return turns

    turns = full()
    turns.write(b"small", OTHER, b"body")
    for number in range(40):
        clock.now_s += 1
        turns.write(b"%d" % number, OWNER, bytes(array("i", range(number, number + 200))))
    turns.close()
    full().close()
    turns = full()
    assert b"body" == await turns.read(b"small")
    assert b"39" in turns and b"0" not in turns
    turns.close()


async def test_a_purge_forgets_what_its_owner_said_and_nobody_else(tmp_path):
    turns = opened(tmp_path)
    conversations, responses = Conversations(10_000, turns), StoredResponses(kept=turns)
    scopes = {salt: CacheScope(tenant=salt) for salt in (b"a", b"b")}
    for salt, scope in scopes.items():
        responses.put(salt, "r", KeptResponse({"id": "r"}, []))
        said = [Transcript("yes", tuple(b"yes"))]
        conversations.remember(turn_of(scope, TURN), array("i", list(b"hi")), said, ByteTokenizer())
    for each in (responses, conversations):
        each.forget(OWNER)
    forget_stored(tmp_path, OWNER)
    turns.close()
    turns = opened(tmp_path)
    conversations, responses = Conversations(10_000, turns), StoredResponses(kept=turns)
    found = {}
    for salt, scope in scopes.items():
        turn = turn_of(scope, ANSWERED)
        await conversations.recall(turn)
        found[salt] = (await responses.get(salt, "r"), conversations.replay(turn))
    assert (None, None) == found[b"a"]
    assert None not in found[b"b"]
    turns.close()


def test_a_purge_fails_where_what_was_said_cannot_be_removed(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    with pytest.raises(PurgeFailed, match="cannot be changed"):
        forget_stored(tmp_path, OWNER)


@pytest.mark.parametrize("begun", [True, False])
async def test_what_a_purge_finds_half_written_is_not_stored(tmp_path, begun):
    """Its transaction ends first, or begins later and stores nothing."""
    turns = opened(tmp_path)
    at_work, go_on = threading.Event(), threading.Event()

    def wait(db):
        at_work.set()
        assert go_on.wait(20)

    if begun:
        turns.write(b"one", OWNER, b"said")
    turns._file.hand_over(wait)
    turns.write(b"two", OWNER, b"said")
    turns.write(b"three", OTHER, b"said")
    assert await asyncio.to_thread(at_work.wait, 20)
    turns.forget(OWNER)
    purged = asyncio.create_task(asyncio.to_thread(forget_stored, tmp_path, OWNER))
    await asyncio.wait([purged], timeout=0.1)
    go_on.set()
    await purged
    turns.close()
    assert [(b"three",)] == rows(tmp_path, "SELECT name FROM kept")


async def test_what_is_forgotten_while_it_is_read_does_not_come_back(tmp_path, monkeypatch):
    """A purge, or a client that deletes what another asks for."""
    turns = opened(tmp_path)
    conversations, responses = Conversations(10_000, turns), StoredResponses(kept=turns)
    first, turn = (turn_of(CacheScope(tenant=b"a"), each) for each in (TURN, ANSWERED))
    said = [Transcript("yes", tuple(b"yes"))]
    conversations.remember(first, array("i", list(b"hi")), said, ByteTokenizer())
    responses.put(b"a", "r", KeptResponse({"id": "r"}, []))
    turns.close()
    turns = opened(tmp_path)
    conversations, responses = Conversations(10_000, turns), StoredResponses(kept=turns)
    rows, both = turns._file.rows, threading.Barrier(2, lambda: turns.forget(OWNER))

    def rows_and_purge(*query):
        found = rows(*query)
        both.wait(10)
        return found

    monkeypatch.setattr(turns._file, "rows", rows_and_purge)
    await asyncio.gather(responses.get(b"a", "r"), conversations.recall(turn))
    assert (0, 0) == (responses.num_bytes, conversations.num_tokens)
    turns.close()


async def test_a_conversation_is_replayed_after_a_restart_from_its_latest_answer(tmp_path):
    scope, tokenizer, turns = CacheScope(tenant=b"a"), ByteTokenizer(), opened(tmp_path)
    conversations = Conversations(10_000, turns)
    messages, prompt = list(TURN), array("i", list(b"hi "))
    for number in range(6):
        said = f"answer {number}"
        told = [Transcript(said, tuple(said.encode()))]
        conversations.remember(turn_of(scope, messages), prompt, told, tokenizer)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        prompt = prompt + array("i", list(said.encode())) + array("i", list(b" go on "))
    turns.close()
    turns = opened(tmp_path)
    again = Conversations(10_000, turns)
    turn = turn_of(scope, messages)
    assert None is again.replay(turn)
    await again.recall(turn)
    replay = again.replay(turn)
    assert replay is not None and replay.place == len(messages) - 2
    assert prompt[: len(replay.tokens)] == replay.tokens
    # Of a conversation the last turns are kept, not one row for each.
    assert 2 >= sum(key in turns for key in turn.keys)
    other = turn_of(CacheScope(tenant=b"b"), messages)
    await again.recall(other)
    assert None is again.replay(other)
    turns.close()


@pytest.mark.parametrize("body", [b"", b"x", zlib.compress(b"[1"), zlib.compress(b"[9, null]\n")])
async def test_a_body_that_cannot_be_read_is_not_found(tmp_path, body):
    turns = opened(tmp_path)
    turn = turn_of(CacheScope(tenant=b"a"), ANSWERED)
    turns.write(turn.keys[1], OWNER, b"good")
    turns.close()
    rows(tmp_path, "UPDATE kept SET body = ?", (body,))
    turns = opened(tmp_path)
    conversations = Conversations(10_000, turns)
    await conversations.recall(turn)
    assert None is conversations.replay(turn)
    turns.close()

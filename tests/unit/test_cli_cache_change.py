"""`cachesvc cache evict|purge|compact`: what they do to a disk tier, and refuse."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from api.access.auth import Salts
from api.requests.kept import owner_of
from billing.reports.receipts import ReceiptSigner, verify_receipt
from billing.store.opening import database_url
from cachesvc.cli import app
from cachesvc.config.places import disk_path
from cachesvc.operator.purge import RECEIPTS
from cachesvc.operator.scopes import FILE_NAME, note_scopes
from cachesvc.operator.secret import read_secret
from cachesvc.server.state_file import FILE_NAME as STATE_NAME
from tests.support.billing import running_ledger
from tests.support.faulty_storage import chain
from tests.support.state import FiledTurns
from tests.support.wire import fake_house
from tests.unit.test_cli_cache import LAYOUT, store
from tiers.blocks.keys import BlockId, CacheScope
from tiers.disk.inspection.view import open_view
from tiers.disk.open import open_disk
from tiers.disk.pin_file import save_pins
from tiers.disk.tier import DiskTier
from tiers.policy.retention import Pin

OTHER = CacheScope(weights=b"tiny", tenant=b"other")
HOUR_S = 3600
MINE = chain(6, block_size=LAYOUT.block_size)
BRANCH = chain(3, block_size=LAYOUT.block_size, seed=1)
THEIRS = chain(4, block_size=LAYOUT.block_size, scope=OTHER)
EVERY = [*MINE, *BRANCH, *THEIRS]


def call(command: str, data_dir: Path, *arguments: str, answer: str | None = None) -> Result:
    command_line = ["cache", command, *arguments, "--data-dir", str(data_dir)]
    return CliRunner().invoke(app, command_line, input=answer)


def called_apart(command: str, data_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as LMDB wants it beside an open tier."""
    start = "from cachesvc.cli import main; main()"
    command_line = [sys.executable, "-c", start, "cache", command, *arguments]
    return subprocess.run(
        [*command_line, "--data-dir", str(data_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def told(result: Result) -> dict[str, Any]:
    assert 0 == result.exit_code, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def opened(data_dir: Path, clock: Callable[[], float] = time.time, shards: int = 1) -> DiskTier:
    return open_disk(disk_path(data_dir), LAYOUT, 64 << 20, clock=clock, num_shards=shards)


def keys(data_dir: Path) -> set[bytes]:
    with open_view(disk_path(data_dir)) as view:
        return {block.key for block in view.blocks()}


def key_set(*chains: list[BlockId]) -> set[bytes]:
    return {block.key for ids in chains for block in ids}


@pytest.fixture
def data_dir(tmp_path):
    """MINE was used three hours ago, the rest now."""
    path = tmp_path / "here"
    path.mkdir()
    past = opened(path, lambda: time.time() - 3 * HOUR_S)
    store(past, MINE)
    past.close()
    tier = opened(path)
    store(tier, BRANCH)
    store(tier, THEIRS)
    tier.close()
    return path


def test_evict_older_than_leaves_what_was_used_since(data_dir):
    rules = ("--older-than", "2h", "--scope", THEIRS[0].scope.hex())
    assert 0 == told(call("evict", data_dir, *rules, "--json"))["num_blocks"], "every rule holds"
    assert key_set(EVERY) == keys(data_dir)
    gone = told(call("evict", data_dir, "--older-than", "2h", "--yes", "--json"))
    assert (len(MINE), None) == (gone["num_blocks"], gone["server"])
    assert key_set(BRANCH, THEIRS) == keys(data_dir)


def test_evict_bytes_takes_the_oldest_and_no_more_than_it_must(data_dir):
    with open_view(disk_path(data_dir)) as view:
        oldest = next(iter(view.blocks(oldest=True)))
    gone = told(call("evict", data_dir, "--bytes", "1KiB", "--yes", "--json"))
    assert (1, oldest.stored_bytes) == (gone["num_blocks"], gone["stored_bytes"])
    assert key_set(EVERY) - {oldest.key} == keys(data_dir)


def test_evict_without_a_rule_or_with_a_wrong_one_is_refused(data_dir):
    for arguments, message in (
        ((), "--older-than"),
        (("--older-than", "soon"), "is not a duration"),
        (("--bytes", "many"), "is not a size"),
        (("--scope", "zz"), "is not a key"),
    ):
        refused = call("evict", data_dir, *arguments)
        assert 2 == refused.exit_code, refused.output
        assert message in refused.stderr
    assert key_set(EVERY) == keys(data_dir)


@pytest.mark.parametrize(("answer", "why"), [("n\n", "nothing was"), ("", "--yes")])
def test_nothing_goes_unless_confirmed(data_dir, answer, why):
    asked = call("evict", data_dir, "--all", answer=answer)
    assert 1 == asked.exit_code
    assert why in asked.stderr
    assert f"{len(EVERY)} blocks" in asked.stderr
    assert key_set(EVERY) == keys(data_dir)


def test_evict_leaves_what_is_pinned_unless_told(data_dir):
    pin = Pin(name="house", keys=tuple(block.key for block in THEIRS[:2]), until_s=9e9)
    save_pins(disk_path(data_dir), [pin])
    first = told(call("evict", data_dir, "--all", "--yes", "--json"))
    assert told(call("evict", data_dir, "--all", "--yes", "--json"))["num_blocks"] == 0
    assert told(call("evict", data_dir, "--all", "--pinned", "--yes", "--json"))["num_blocks"] == 2
    assert len(EVERY) - 2 == first["num_blocks"]
    assert set() == keys(data_dir)


def test_evict_by_scope_takes_the_whole_scope_and_only_it(data_dir):
    unknown = call("evict", data_dir, "--scope", "0" * 32, "--yes")
    assert (1, True) == (unknown.exit_code, "no scope's root begins with" in unknown.stderr)
    told(call("evict", data_dir, "--scope", THEIRS[0].scope.hex()[:8], "--yes", "--json"))
    assert key_set(MINE, BRANCH) == keys(data_dir)


def test_a_purge_says_why_asks_and_leaves_a_signed_receipt_and_a_trail(data_dir):
    salts = Salts(read_secret(data_dir))
    served = replace(OTHER, tenant=salts.of_tenant("acme"))
    (data_dir / FILE_NAME).write_text(
        json.dumps([{"model": "m", "scope": {"weights": b"tiny".hex()}}])
    )
    ours = chain(4, block_size=LAYOUT.block_size, scope=served)
    tier = opened(data_dir)
    store(tier, ours)
    tier.close()
    with running_ledger(database_url(data_dir)) as house:  # makes the tenant acme
        unsaid = call("purge", data_dir, "--tenant", "acme")
        assert (2, True) == (unsaid.exit_code, "say why with --reason" in unsaid.stderr)
        flags = ("--tenant", "acme", "--reason", "left", "--json")
        assert 1 == call("purge", data_dir, *flags, answer="n\n").exit_code
        assert key_set(EVERY, ours) == keys(data_dir)
        signed = told(call("purge", data_dir, *flags, "--yes"))
        (entry,) = house.accounts.trail.newest(1)
    assert key_set(EVERY) == keys(data_dir), "only the tenant's"
    (kept,) = (data_dir / RECEIPTS).iterdir()
    assert signed == json.loads(kept.read_text()) == json.loads(entry["after"])
    assert verify_receipt(signed, ReceiptSigner.open(data_dir).public_key)
    assert ("acme", "left", 0) == (signed["tenant"], signed["why"], signed["blocks_left"])
    assert signed["tiers"] == {"disk": {"blocks": 4, "bytes": signed["tiers"]["disk"]["bytes"]}}
    assert ("cache.purge", "left") == (entry["action"], entry["reason"])


def test_a_tenant_that_does_not_exist_is_not_purged(data_dir):
    """A name mistyped must not get a receipt that says that nothing of it is left."""
    house = fake_house(salts=Salts(read_secret(data_dir)))
    note_scopes(data_dir, house.wire.inference.models.values())
    house.close()
    with running_ledger(database_url(data_dir)):  # makes the tenant acme
        pass
    failed = call("purge", data_dir, "--tenant", "amce", "--reason", "left", "--yes")
    assert (1, True) == (failed.exit_code, "no tenant is named 'amce'" in failed.stderr)
    assert not (data_dir / RECEIPTS).exists()
    done = call("purge", data_dir, "--tenant", "acme", "--reason", "left", "--yes", "--json")
    assert "acme" == told(done)["tenant"]
    (data_dir / FILE_NAME).write_text("[")
    failed = call("purge", data_dir, "--tenant", "acme", "--reason", "left", "--yes")
    assert (1, True) == (failed.exit_code, "scopes.json is damaged" in failed.stderr)


def test_a_purge_of_a_stopped_server_takes_turns_and_responses(data_dir):
    house, salts = fake_house(), Salts(read_secret(data_dir))
    note_scopes(data_dir, house.wire.inference.models.values())
    house.close()
    with running_ledger(database_url(data_dir)):  # makes the tenant acme
        pass
    turns = FiledTurns(data_dir / STATE_NAME)
    turns.start()
    for tenant in ("acme", "bolt"):
        turns.write(tenant.encode(), owner_of(salts.of_tenant(tenant)), b"said")
    turns.close()
    command = ("purge", data_dir, "--tenant", "acme", "--reason", "left", "--yes", "--json")
    told(call(*command))
    left = FiledTurns(data_dir / STATE_NAME)
    assert [False, True] == [b"acme" in left, b"bolt" in left]
    (data_dir / STATE_NAME).write_bytes(b"no database" * 1000)
    failed = call(*command)
    assert (1, True) == (failed.exit_code, "cannot be changed" in failed.stderr)
    assert 1 == len(list((data_dir / RECEIPTS).iterdir()))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "one of --key, --file and --system"),
        (("--key", "ab", "--file", "x"), "one of --key, --file and --system"),
        (("--file", "x"), "--tenant or --group"),
    ],
)
def test_a_pin_that_is_not_clear_is_asked_for_by_options(data_dir, flags, message):
    failed = call("pin", data_dir, "house", "--reason", "hot", "--for", "1h", *flags)
    assert (2, True) == (failed.exit_code, message in failed.stderr)


@pytest.mark.parametrize("served", [False, True])
def test_evicted_and_free_space_returns_to_the_file_system(data_dir, served):
    file = next(disk_path(data_dir).glob("shard-*/data.mdb"))
    tier = opened(data_dir) if served else None
    if tier is not None:
        tier.discard([block.key for block in MINE])
    before = file.stat().st_blocks * 512
    done = called_apart("compact", data_dir, "--json")
    assert 0 == done.returncode, done.stderr
    held = file.stat().st_blocks * 512
    assert {"file_bytes_before": before, "file_bytes": held} == json.loads(done.stdout)
    gone = called_apart("evict", data_dir, "--all", "--yes", "--json")
    assert 0 == gone.returncode, gone.stderr
    assert served is ("in its memory" in gone.stderr)
    left = file.stat().st_blocks * 512
    assert held - left == json.loads(gone.stdout)["returned_bytes"] > 0
    assert left < held / 2
    if tier is not None:
        assert 0 == tier.probe(THEIRS)
        tier.close()


def test_a_pipe_that_closes_early_is_no_damage(data_dir):
    command = (
        f"import sys; sys.argv = ['cachesvc', 'cache', 'tree', '--data-dir', {str(data_dir)!r}]"
    )
    start = f"{command}; from cachesvc.cli import main; main()"
    for line in ("", "import sys, io; sys.stdout.reconfigure(write_through=True); "):
        with subprocess.Popen(
            [sys.executable, "-c", line + start], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as running:
            assert running.stdout is not None and running.stderr is not None
            running.stdout.close()
            assert b"" == running.stderr.read()


def test_a_directory_without_a_disk_tier_is_named_without_a_traceback(tmp_path):
    for command in (("evict", "--all"), ("compact",)):
        failed = called_apart(command[0], tmp_path, *command[1:])
        assert 1 == failed.returncode
        assert "error:" in failed.stderr
        assert str(tmp_path) in failed.stderr
        assert "Traceback" not in failed.stderr

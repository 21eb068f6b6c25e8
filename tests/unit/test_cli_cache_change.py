"""`cachesvc cache purge|pin`: what they do to a disk tier, and refuse."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from api.access.auth import Salts
from api.requests.kept import owner_of
from billing.reports.receipts import ReceiptSigner, verify_receipt
from billing.store.opening import database_url
from cachesvc.config.places import disk_path
from cachesvc.operator.purge import RECEIPTS
from cachesvc.operator.scopes import FILE_NAME, note_scopes
from cachesvc.operator.secret import read_secret
from cachesvc.server.state_file import FILE_NAME as STATE_NAME
from tests.support.billing import running_ledger
from tests.support.commands import said
from tests.support.faulty_storage import chain
from tests.support.state import FiledTurns
from tests.support.wire import byte_model
from tests.unit.test_cli_cache import LAYOUT, store
from tiers.blocks.keys import CacheScope
from tiers.disk.inspection.view import open_view
from tiers.disk.open import open_disk

OTHER = CacheScope(weights=b"tiny", tenant=b"other")
MINE = chain(6, block_size=LAYOUT.block_size)
BRANCH = chain(3, block_size=LAYOUT.block_size, seed=1)
THEIRS = chain(4, block_size=LAYOUT.block_size, scope=OTHER)


def changed(command, data_dir, *words, **how):
    return said("cache", command, *words, "--data-dir", data_dir, **how)


def opened(data_dir):
    return open_disk(disk_path(data_dir), LAYOUT, 64 << 20)


def keys(data_dir):
    with open_view(disk_path(data_dir)) as view:
        return {block.key for block in view.blocks()}


EVERY_KEY = {block.key for block in (*MINE, *BRANCH, *THEIRS)}


@pytest.fixture
def data_dir(tmp_path):
    path = tmp_path / "here"
    path.mkdir()
    tier = opened(path)
    for ids in (MINE, BRANCH, THEIRS):
        store(tier, ids)
    tier.close()
    return path


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
        unsaid = changed("purge", data_dir, "--tenant", "acme", code=2)
        assert "say why with --reason" in unsaid
        flags = ("--tenant", "acme", "--reason", "left", "--json")
        changed("purge", data_dir, *flags, input="n\n", code=1)
        assert EVERY_KEY | {block.key for block in ours} == keys(data_dir)
        signed = json.loads(changed("purge", data_dir, *flags, "--yes"))
        (entry,) = house.accounts.trail.newest(1)
    assert EVERY_KEY == keys(data_dir), "only the tenant's"
    (kept,) = (data_dir / RECEIPTS).iterdir()
    assert signed == json.loads(kept.read_text()) == json.loads(entry["after"])
    assert verify_receipt(signed, ReceiptSigner.open(data_dir).public_key)
    assert ("acme", "left", 0) == (signed["tenant"], signed["why"], signed["blocks_left"])
    assert "stopped" == signed["server"]
    assert signed["tiers"] == {"disk": {"blocks": 4, "bytes": signed["tiers"]["disk"]["bytes"]}}
    assert ("cache.purge", "left") == (entry["action"], entry["reason"])


@pytest.fixture
def with_acme(data_dir):
    """The same, with a list of served models and a ledger that knows the tenant acme."""
    read_secret(data_dir)
    note_scopes(data_dir, [byte_model()])
    with running_ledger(database_url(data_dir)):
        pass
    return data_dir


LEFT = ("--reason", "left", "--yes")


def test_a_tenant_that_does_not_exist_is_not_purged(with_acme):
    """A name mistyped must not get a receipt that says that nothing of it is left."""
    refused = changed("purge", with_acme, "--tenant", "amce", *LEFT, code=1)
    assert "no tenant is named 'amce'" in refused
    assert not (with_acme / RECEIPTS).exists()
    purge = ("purge", with_acme, "--tenant", "acme", *LEFT)
    assert "acme" == json.loads(changed(*purge, "--json"))["tenant"]
    (with_acme / FILE_NAME).write_text("[")
    assert "scopes.json is damaged" in changed(*purge, code=1)


def test_a_purge_of_a_stopped_server_takes_turns_and_responses(with_acme):
    salts = Salts(read_secret(with_acme))
    turns = FiledTurns(with_acme / STATE_NAME)
    turns.start()
    for tenant in ("acme", "bolt"):
        turns.write(tenant.encode(), owner_of(salts.of_tenant(tenant)), b"said")
    turns.close()
    changed("purge", with_acme, "--tenant", "acme", *LEFT)
    left = FiledTurns(with_acme / STATE_NAME)
    assert [False, True] == [b"acme" in left, b"bolt" in left]
    (with_acme / STATE_NAME).write_bytes(b"no database" * 1000)
    assert "cannot be changed" in changed("purge", with_acme, "--tenant", "acme", *LEFT, code=1)
    assert 1 == len(list((with_acme / RECEIPTS).iterdir()))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "one of --key, --file and --system"),
        (("--key", "ab", "--file", "x"), "one of --key, --file and --system"),
        (("--file", "x"), "--tenant or --group"),
    ],
)
def test_a_pin_that_is_not_clear_is_asked_for_by_options(data_dir, flags, message):
    refused = changed("pin", data_dir, "house", "--reason", "hot", "--for", "1h", *flags, code=2)
    assert message in refused


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

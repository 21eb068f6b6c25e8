"""`cachesvc cache purge|pin`: what they do to a disk tier, and refuse."""

import subprocess
import sys

import pytest

from cachesvc.config.places import disk_path
from tests.support.commands import said
from tests.support.faulty_storage import chain
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


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ((), 2, "either --tenant or --group"),
        (("--tenant", "a", "--group", "b"), 2, "either --tenant or --group"),
        (("--tenant", "acme"), 2, "say why with --reason"),
        (("--tenant", "acme", "--reason", "left"), 1, "no server runs on"),
        (("--tenant", "acme", "--database-url", "x"), 2, "the running server purges"),
    ],
)
def test_a_purge_says_whose_and_why_and_needs_the_server(data_dir, flags, code, message):
    assert message in changed("purge", data_dir, *flags, code=code)
    assert EVERY_KEY == keys(data_dir)


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

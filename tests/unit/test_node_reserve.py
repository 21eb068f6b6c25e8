"""What a node's disk leaves to others on its file system, from the option to the tier."""

from contextlib import closing

from typer.testing import CliRunner

from cachesvc.cli import app
from tiers.blocks.layout import BlockLayout
from tiers.node.below import open_below
from tiers.node.settings import NodeSettings
from tiers.telemetry.events import EventStream

MIB = 1 << 20
LAYOUT = BlockLayout.uniform(2, 64, 2, 64, "bfloat16")


def test_the_option_reaches_the_settings(tmp_path, monkeypatch):
    told: list[NodeSettings] = []
    monkeypatch.setattr("cachesvc.server.node.run_node", lambda node, **_: told.append(node))
    monkeypatch.setattr("cachesvc.server.logs.configure", lambda log: None)
    command = ["node", "--socket", str(tmp_path / "s"), "--disk-cache-dir", str(tmp_path)]
    for more in ([], ["--disk-reserve", "64MiB"]):
        assert 0 == CliRunner().invoke(app, [*command, *more]).exit_code
    assert [None, 64 * MIB] == [each.disk_reserve_bytes for each in told]


def test_the_disk_of_a_node_leaves_it(tmp_path):
    """More than any file system has, so that nothing is left for blocks."""
    sizes = []
    for reserve in (0, 1 << 60):
        settings = NodeSettings(
            socket=tmp_path / "s",
            host_bytes=MIB,
            disk_dir=tmp_path / str(reserve),
            disk_bytes=64 * MIB,
            disk_reserve_bytes=reserve,
        )
        with closing(open_below(settings, LAYOUT, None, EventStream())) as tier:
            sizes.append(tier.stats().capacity_bytes)
    assert sizes[0] == 64 * MIB > sizes[1]

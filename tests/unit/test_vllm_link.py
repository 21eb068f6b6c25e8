"""How a vLLM engine reaches its node: one that fails is a miss, and one that is back is used."""

from cachesvc.vllm.link import REFUSED_S, RETRY_S, NodeLink
from tests.support.disks import Clock
from tests.unit.test_node_socket import LAYOUT, below, prompt, serving, write
from tiers.node.messages import engine_layout
from tiers.tier import TierName


def put(node):
    write(node, prompt(1))
    return True


def test_a_node_that_is_away_is_a_miss_is_left_alone_for_a_while_and_is_told_once(tmp_path, caplog):
    path, clock = tmp_path / "node.sock", Clock()
    link = NodeLink(path, LAYOUT, timeout_s=5, clock_s=clock)
    for faults in (1, 2):
        clock.now_s += RETRY_S
        assert ([], faults) == (link.probe(prompt(1)), link.faults)
    with serving(path):
        assert ([], 2) == (link.probe(prompt(1)), link.faults), "it is not asked again at once"
        clock.now_s += RETRY_S
        for _ in range(2):
            assert link.attempt(put)
        assert ([TierName.HOST] * 3, 2) == (link.probe(prompt(1)), link.faults)
        link.close()
    away, back = (record.getMessage() for record in caplog.records)
    assert "until it is back" in away and "is back" in back


def test_a_node_that_was_restarted_is_joined_without_a_miss(tmp_path):
    path = tmp_path / "node.sock"
    link = NodeLink(path, LAYOUT, timeout_s=5, clock_s=Clock())
    with serving(path, **below(tmp_path)):
        assert link.attempt(put)
    with serving(path, **below(tmp_path)):
        assert ([TierName.DISK] * 3, 0) == (link.probe(prompt(1)), link.faults)
        link.close()


def test_a_node_that_refuses_is_joined_again_after_a_minute_and_logs_little(tmp_path, caplog):
    path, clock = tmp_path / "node.sock", Clock()
    link = NodeLink(path, engine_layout(2, 1 << 20, 4, "float32"), timeout_s=5, clock_s=clock)
    with serving(path):
        for _ in range(2 * int(REFUSED_S)):
            link.join()
            clock.now_s += RETRY_S
    assert 2 == len(caplog.records)


def test_a_node_that_hangs_is_waited_for_once(tmp_path, monkeypatch):
    path, asked = tmp_path / "node.sock", []
    link = NodeLink(path, LAYOUT, timeout_s=0.2, clock_s=Clock())
    with serving(path) as node:
        assert link.attempt(put)
        monkeypatch.setattr(node, "_handle", lambda *request: asked.append(request))
        link.fetch(prompt(1))  # has no answer
        assert ([], 1, 2) == (link.probe(prompt(1)), link.faults, len(asked))
        link.close()

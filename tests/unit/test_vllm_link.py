"""How a vLLM engine reaches its node: one that fails is a miss, and one that is back is used."""

from cachesvc.vllm.link import RETRY_S, NodeLink
from tests.support.disks import Clock
from tests.unit.test_node_socket import LAYOUT, below, prompt, serving, write
from tiers.tier import TierName


def put(node):
    write(node, prompt(1))
    return True


def link_to(path, clock):
    return NodeLink(path, LAYOUT, timeout_s=5, clock_s=clock)


def test_a_node_that_is_away_is_a_miss_and_is_left_alone_for_a_while(tmp_path):
    path, clock = tmp_path / "node.sock", Clock()
    link = link_to(path, clock)
    assert ([], 1) == (link.probe(prompt(1)), link.faults)
    with serving(path):
        assert ([], 1) == (link.probe(prompt(1)), link.faults), "it is not asked again at once"
        clock.now_s += RETRY_S
        assert link.attempt(put)
        assert ([TierName.HOST] * 3, 1) == (link.probe(prompt(1)), link.faults)
        link.close()


def test_an_outage_is_told_once(tmp_path, caplog):
    path, clock = tmp_path / "node.sock", Clock()
    link = link_to(path, clock)
    for _ in range(5):
        assert [] == link.probe(prompt(1))
        clock.now_s += RETRY_S
    with serving(path):
        for _ in range(2):
            assert link.attempt(put)
        link.close()
    told = [record.getMessage() for record in caplog.records]
    assert 2 == len(told)
    assert "until it is back" in told[0] and "is back" in told[1]


def test_a_node_that_was_restarted_is_joined_without_a_miss(tmp_path):
    path = tmp_path / "node.sock"
    link = link_to(path, Clock())
    with serving(path, **below(tmp_path)):
        assert link.attempt(put)
    with serving(path, **below(tmp_path)):
        assert ([TierName.DISK] * 3, 0) == (link.probe(prompt(1)), link.faults)
        link.close()


def test_a_node_that_hangs_is_waited_for_once(tmp_path, monkeypatch):
    path, asked = tmp_path / "node.sock", []
    link = NodeLink(path, LAYOUT, timeout_s=0.2, clock_s=Clock())
    with serving(path) as node:
        assert link.attempt(put)
        monkeypatch.setattr(node, "_handle", lambda *request: asked.append(request))
        assert ([], 1, 1) == (link.probe(prompt(1)), link.faults, len(asked))
        link.close()

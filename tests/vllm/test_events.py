"""Our block events, decoded by vLLM's own classes: what a router made for vLLM gets to see."""

import json
import subprocess
import threading
from contextlib import closing

import pytest

from cachesvc.config.sections import ZmqTable
from cachesvc.observability.kv_events import KvEventPublisher, block_hash
from tests.support.threads import beside, ending
from tests.vllm.processes import PYTHON, ROOT
from tiers.blocks.keys import CacheScope, block_ids, token_bytes
from tiers.telemetry.events import Cause, EventKind, EventStream
from tiers.tier import TierName

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 4
# What vLLM's documentation gives as a subscriber, with its own schema.
SUBSCRIBER = """
import json, sys
import msgspec, zmq
from vllm.distributed.kv_events import KVEventBatch
decode = msgspec.msgpack.Decoder(type=KVEventBatch).decode
socket = zmq.Context().socket(zmq.SUB)
socket.connect(sys.argv[1])
socket.setsockopt_string(zmq.SUBSCRIBE, "kv-events")
print(json.dumps("ready"), flush=True)
while True:
    topic, number, payload = socket.recv_multipart()
    batch = decode(payload)
    for event in batch.events:
        told = {field: getattr(event, field) for field in event.__struct_fields__}
        print(json.dumps({"type": type(event).__name__, **told}), flush=True)
        if type(event).__name__ == "BlockRemoved":
            sys.exit()
"""


def test_vllms_own_schema_reads_our_events():
    stream = EventStream()
    ids = block_ids(CacheScope(weights=b"w").root(), token_bytes(range(2 * BLOCK)), BLOCK)
    section = ZmqTable(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    with closing(KvEventPublisher(stream, section)) as publisher:
        publisher.start()
        command = [PYTHON, "-c", SUBSCRIBER, publisher.endpoints[0]]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as router:
            try:
                assert "ready" == json.loads(router.stdout.readline())
                events = read(router, stream, ids)
            finally:
                router.kill()
    stored = [event for event in events if event["type"] == "BlockStored"]
    hashes = [number for event in stored for number in event["block_hashes"]]
    assert {block_hash(each.key) for each in ids} == set(hashes)
    assert {"GPU"} == {event["medium"] for event in stored}
    assert {BLOCK} == {event["block_size"] for event in stored}
    removed = events[-1]
    assert ("BlockRemoved", "GPU") == (removed["type"], removed["medium"])
    assert set(removed["block_hashes"]) <= set(hashes)


def read(router: "subprocess.Popen[str]", stream: EventStream, ids: list) -> list[dict]:
    """What the router has decoded. A subscription takes a moment, so the blocks come again until
    it has seen them."""
    events = []
    seen, stop = threading.Event(), threading.Event()

    def publish() -> None:
        while not stop.wait(0.2):
            for block in ids:
                about = {"parent": block.parent, "scope": block.scope, "tokens": block.tokens}
                stream.publish(EventKind.STORED, TierName.DEVICE, key=block.key, **about)
            if seen.is_set():
                stream.publish(EventKind.REMOVED, TierName.DEVICE, key=ids[0].key, cause=Cause.ROOM)

    with beside(publish), ending(stop):
        for line in router.stdout:
            events.append(json.loads(line))
            if events[-1]["type"] == "BlockStored":
                seen.set()
    return events

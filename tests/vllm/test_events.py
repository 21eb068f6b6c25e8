"""Our block events, decoded by vLLM's own classes: what a router made for vLLM gets to see. How it
gets them is tested in `tests/unit/test_kv_events.py`."""

import json
import subprocess
from contextlib import closing
from unittest.mock import Mock

import pytest

from cachesvc.config.sections import ZmqTable
from cachesvc.observability.kv_events import KvEventPublisher, block_hash
from tests.vllm.processes import PYTHON, ROOT
from tiers.blocks.keys import CacheScope, block_ids, token_bytes
from tiers.telemetry.events import Cause, EventKind, EventStream
from tiers.tier import TierName

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK, GPU = 4, TierName.DEVICE
DECODER = """
import json, sys
import msgspec
from vllm.distributed.kv_events import KVEventBatch
batch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=KVEventBatch)
told = [{f: getattr(each, f) for f in each.__struct_fields__} for each in batch.events]
print(json.dumps([(type(each).__name__, fields) for each, fields in zip(batch.events, told)]))
"""


def test_vllms_own_schema_reads_our_events(monkeypatch):
    stream, sent = EventStream(), []
    ids = block_ids(CacheScope(weights=b"w").root(), token_bytes(range(2 * BLOCK)), BLOCK)
    with closing(KvEventPublisher(stream, ZmqTable(endpoint="tcp://127.0.0.1:*"))) as publisher:
        monkeypatch.setattr(publisher, "_pub", Mock(send_multipart=sent.append))
        for each in ids:
            about = {"parent": each.parent, "scope": each.scope, "tokens": each.tokens}
            stream.publish(EventKind.STORED, GPU, key=each.key, **about)
        stream.publish(EventKind.REMOVED, GPU, key=ids[0].key, cause=Cause.ROOM)
        publisher._publish_taken()
        monkeypatch.undo()
    [(_, _, payload)] = sent
    command = [PYTHON, "-c", DECODER]
    done = subprocess.run(command, input=payload, stdout=subprocess.PIPE, cwd=ROOT, check=True)
    (stored, blocks), (removed, gone) = json.loads(done.stdout)
    assert ("BlockStored", "BlockRemoved") == (stored, removed)
    hashes = [block_hash(each.key) for each in ids]
    assert (hashes, hashes[:1]) == (blocks["block_hashes"], gone["block_hashes"])
    assert ("GPU", "GPU", BLOCK) == (blocks["medium"], gone["medium"], blocks["block_size"])
    assert [*range(2 * BLOCK)] == blocks["token_ids"]

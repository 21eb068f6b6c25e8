"""Traces as files: both encodings, and what is said of a file that is not one."""

import gzip
import json

import pytest
import zstandard

from tiers.replay.trace import TraceError, TraceRequest, read_trace

LINE = {"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [5, 6, 7]}
TEXT = (json.dumps(LINE) + "\n\n").encode()


@pytest.mark.parametrize(
    ("name", "data"), [("t.jsonl", TEXT), ("t.jsonl.gz", gzip.compress(TEXT, mtime=0))]
)
def test_plain_and_gzip_read_alike(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    trace = read_trace(path)
    assert list(trace.requests) == [TraceRequest(3.0, 1030, (5, 6, 7), 7, None)]
    assert (trace.input_tokens, trace.working_set_blocks()) == (1030, 3)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("cut.gz", gzip.compress(TEXT * 50, mtime=0)[:-20], "cannot read the trace"),
        ("not.gz", b"plain", "cannot read the trace"),
        ("bad.gz", gzip.compress(TEXT, mtime=0)[:12] + b"\xff" * 40, "cannot read the trace"),
        ("t.jsonl.zst", zstandard.compress(TEXT), "cannot read the trace"),
        ("bytes.jsonl", b"\xff\xfe", "cannot read the trace"),
        ("empty.jsonl", b"\n", "holds no request"),
        ("text.jsonl", TEXT + b"hello", "line 3: not JSON"),
        ("list.jsonl", b"[1]", "line 1: each line must be a JSON object"),
        ("short.jsonl", b'{"timestamp": 1, "input_length": 5}', "hash_ids must be a list"),
        ("minus.jsonl", TEXT.replace(b"1030", b"-1"), "input_length must be a number"),
        ("clock.jsonl", TEXT.replace(b"3000", b'"x"'), "timestamp must be a number"),
        ("nan.jsonl", TEXT.replace(b"3000", b"NaN"), "timestamp must be a number"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_line(tmp_path, name, data, message):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(TraceError, match=message) as refused:
        read_trace(path)
    assert name in str(refused.value)

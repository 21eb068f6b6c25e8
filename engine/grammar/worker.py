"""The child process that compiles grammars: a stranger's schema may hang it, fill its memory or
crash it, and the server only starts another.

Started by `engine.grammar.compiler` with pipes for stdin and stdout. Messages are a length of four
bytes and that many bytes: first the vocabulary as JSON, then one source after another; each answer
begins with `+` and the compiled grammar, or with `-` and what is wrong.
"""

import contextlib
import json
import resource
import struct
import sys
from pathlib import Path
from typing import BinaryIO

from engine.errors import InvalidParameter
from engine.grammar.matcher import Vocabulary, compile_source, new_compiler
from engine.structure import Source, SourceKind

MEMORY_BYTES = 1 << 30  # of address space beyond what the process has when it is ready
HEADER = struct.Struct("<I")


def main() -> None:
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    given = json.loads(_read(reader) or b"{}")
    vocabulary = Vocabulary([t.encode("latin-1") for t in given["tokens"]], given["end"])
    compiler = new_compiler(vocabulary)
    _bound_memory()
    _write(writer, b"+")
    while (message := _read(reader)) is not None:
        kind, text = json.loads(message)
        try:
            compiled = compile_source(compiler, Source(SourceKind(kind), text))
            answer = b"+" + compiled.serialize_json().encode()
        except InvalidParameter as error:
            answer = b"-" + str(error).encode()
        _write(writer, answer)


def _bound_memory() -> None:
    """More than this raises or aborts; the server reports either."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read(reader: BinaryIO) -> bytes | None:
    """One message; None at the end of the pipe."""
    header = reader.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return reader.read(HEADER.unpack(header)[0])


def _write(writer: BinaryIO, message: bytes) -> None:
    writer.write(HEADER.pack(len(message)) + message)
    writer.flush()

"""A server that says what its memory is made of, asked from outside while it serves.

    python -m tests.bench.inside SOCKET BOUNDS serve --model ...

It is `cachesvc` with one more thread. A connection to the Unix socket sends one line, the name of a
question, and reads the answer as JSON. `ask` does both. BOUNDS is JSON: values for constants of
modules (`api.requests.fingerprints:MAX_BYTES`) and for defaults of classes
(`module:Class.parameter`).
"""

import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import re
import socket
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

from cachesvc.cli import main

PAGE = os.sysconf("SC_PAGE_SIZE")
PRESENT = 1 << 63  # of a page's 8 bytes in /proc/self/pagemap
KINDS = ("Anon", "File", "Shmem")  # of resident memory, in /proc/self/status


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of <malloc.h>; `mmapped` are bytes in mappings of their own."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "mmapped", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


def ask(path: Path, question: str) -> Any:
    """The server's answer."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        link.sendall(question.encode() + b"\n")
        return json.load(link.makefile())


def figures() -> dict[str, int]:
    """The memory of this process in bytes, as the kernel, malloc and SQLite count it, and the
    number of Python's objects."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident = {kind: int(status[f"Rss{kind}"].split()[0]) << 10 for kind in KINDS}
    heaps, mmapped = _heaps()
    kept = sum(free for _, free in heaps)
    return {
        "anonymous": resident["Anon"],
        "file": resident["File"],
        "shared": resident["Shmem"],
        "allocated": sum(size - free for size, free in heaps) + mmapped,
        "kept": kept,
        "kept_by_threads": kept - heaps[0][1],
        "arenas": len(heaps),
        "sqlite": _sqlite_bytes(),
        "objects": len(gc.get_objects()),
        "python_blocks": sys.getallocatedblocks(),
    }


def objects() -> dict[str, int]:
    """How many objects there are of each type that the garbage collector knows."""
    gc.collect()
    return dict(Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects()))


def trim() -> dict[str, int]:
    """What is left once malloc has returned whatever it can."""
    gc.collect()
    _libc.malloc_trim(0)
    return figures()


def resident_bytes(address: int, num_bytes: int) -> int:
    """Bytes of the range that are in memory."""
    first, last = address // PAGE, -(-(address + num_bytes) // PAGE)
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        entries = array("Q", pages.read(8 * (last - first)))
    return PAGE * sum(1 for entry in entries if entry & PRESENT)


def _heaps() -> tuple[list[tuple[int, int]], int]:
    """Of each of malloc's arenas its size and what is free of it, the main one first; and the bytes
    in mappings of their own."""
    start, length = ctypes.c_void_p(), ctypes.c_size_t()
    stream = _libc.open_memstream(ctypes.byref(start), ctypes.byref(length))
    _libc.malloc_info(0, stream)
    _libc.fclose(stream)
    text = ctypes.string_at(start.value or 0, length.value).decode()
    _libc.free(start)
    heaps = []
    for heap in re.findall(r"<heap .*?</heap>", text, re.DOTALL):
        free = sum(int(size) for size in re.findall(r'<total type="\w+" .*?size="(\d+)"', heap))
        [size] = re.findall(r'<system type="current" size="(\d+)"', heap)
        heaps.append((int(size), free))
    return heaps, int(_libc.mallinfo2().mmapped)


def _sqlite_bytes() -> int:
    with contextlib.suppress(OSError):
        library = ctypes.CDLL("libsqlite3.so.0")
        library.sqlite3_memory_used.restype = ctypes.c_int64
        return int(library.sqlite3_memory_used())
    return 0


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = Mallinfo
_libc.open_memstream.restype = ctypes.c_void_p
_libc.malloc_info.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.fclose.argtypes = (ctypes.c_void_p,)
QUESTIONS: dict[str, Callable[[], Any]] = {each.__name__: each for each in (figures, objects, trim)}


def _answer(listener: socket.socket) -> None:
    while True:
        link, _ = listener.accept()
        with contextlib.suppress(OSError), link:
            question = link.makefile().readline().strip()
            link.sendall(json.dumps(QUESTIONS[question]()).encode())


def _bound(place: str, value: int) -> None:
    module, _, name = place.partition(":")
    owner, _, parameter = name.rpartition(".")
    if not owner:
        vars(importlib.import_module(module))[name] = value
        return
    of = getattr(importlib.import_module(module), owner)
    assert parameter in inspect.signature(of).parameters, place
    of.__init__ = partialmethod(of.__init__, **{parameter: value})


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv.pop(1))
        listening.listen()
        threading.Thread(target=_answer, args=(listening,), name="inside", daemon=True).start()
        sys.argv[0] = "cachesvc"
        for place, value in json.loads(sys.argv.pop(1)).items():
            _bound(place, value)
        main()

"""What threads freed goes back to the system, and what they may soon use again does not."""

import subprocess
import sys

import pytest

from cachesvc.server.memory import SpareMemory

MIB = 1 << 20
PROGRAM = """
import ctypes, threading
from cachesvc.server.memory import SpareMemory, anonymous_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
together = threading.Barrier(4)

def work():
    libc.free(libc.malloc(30 << 20))  # raises malloc's thresholds, as a buffer of torch does
    together.wait()
    blocks = [libc.malloc(1 << 20) for _ in range(40)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    libc.malloc(1000)  # stays in use, at the end
    for block in blocks:
        libc.free(block)
    together.wait()

memory = SpareMemory()
memory.give_back()
before = anonymous_bytes()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
kept = anonymous_bytes() - before
memory.give_back()
print(kept >> 20, (anonymous_bytes() - before) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_four_threads_freed_goes_back_to_the_system() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    kept, left = map(int, done.stdout.split())
    if kept < 128:
        pytest.skip("this malloc keeps less than is returned")
    assert left < 16, f"{left} of {kept} MiB stay"


def test_growth_is_counted_from_the_least_since_the_last_return() -> None:
    sizes, trims = iter([500, 620, 400, 520, 530, 410, 530]), []
    memory = SpareMemory(
        128 * MIB, resident=lambda: next(sizes) * MIB, trim=lambda pad: trims.append(pad) or 1
    )
    trimmed = []
    for _ in range(6):
        memory.give_back()
        trimmed.append(len(trims))
    assert [0, 0, 0, 0, 1, 1] == trimmed

"""Compiles an attention kernel ahead of time for a GPU that need not be there, with Triton's own
compiler and assembler, and reads what it takes."""

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ALIGNED: Any = [["tt.divisibility", 16]]  # as the launcher finds pointers and the pool's strides
POINTERS = {
    **dict.fromkeys(("tables", "pieces", "lengths", "counts", "firsts"), "i32"),
    **dict.fromkeys(("partial", "maxima", "sums"), "fp32"),
    **dict.fromkeys(("stage", "slabs", "starts", "strides", "blocks"), "i64"),
}
NUMBERS = {"scaling": "fp32", "softcap": "fp32"}


class Taken(NamedTuple):
    """What a program takes: bytes of shared memory and of spilled registers, and registers."""

    shared: int
    spilled: int
    registers: int


def compiled(kernel: Any, chosen: dict[str, Any], dtype: str, capability: int) -> Taken:
    """What a program takes of a kernel with these compile-time arguments and options, for tensors
    of `dtype` (as `fp16`) and a capability such as 90."""
    names = kernel.arg_names
    constants = {name: chosen[name] for name in names if name in chosen}
    options = {name: value for name, value in chosen.items() if name not in constants}
    signature = {name: _type(name, constants, dtype) for name in names}
    attributes = {
        (number,): ALIGNED
        for number, name in enumerate(names)
        if signature[name].startswith("*")
        or (name.endswith(("_stride", "width")) and name not in kernel.do_not_specialize)
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _taken(made.metadata.shared, made.asm["cubin"])


def _type(name: str, constants: dict[str, Any], dtype: str) -> str:
    if name in constants:
        return "constexpr"
    if name in ("query", "pool", "output", "sinks", "x", "cos", "sin", "gate", "up"):
        return f"*{dtype}"
    return f"*{POINTERS[name]}" if name in POINTERS else NUMBERS.get(name, "i32")


def _taken(shared: int, binary: bytes) -> Taken:
    """Every byte of a kernel's stack is a spilled register: its code has no local arrays."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary)
        command = [str(tool), "-res-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return Taken(shared, int(found[2]), int(found[1]))

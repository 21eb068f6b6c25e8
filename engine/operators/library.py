"""Compiles the operators with the machine's own C++ compiler, keeps the result, and loads it.

A forward makes a thousand short calls of torch for each token. Where there is a compiler, four
operators take the place of two thirds of them, and of what attention makes for each sequence.
Without a compiler the forward makes the calls, slower, for the same bits. `python -m
engine.operators` compiles them once for all data directories of this environment, in about 8 s of
one processor. Else the first start does, while the model loads, and later ones load what it kept. A
start serves without a compiler's work if that takes much longer.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
import xxhash

from engine.partial import is_own, keeps_others_out, partial_folder

logger = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
SOURCE = Path(__file__).with_name("operators.cpp")
# Runs a command in a session of its own, and ends it with whoever holds the other end of its stdin:
# this process, however it ends. A compiler has children, which a signal to it does not reach.
_LEASHED = """
exec 3<&0
(read -r _ <&3; kill -9 0) &
TMPDIR=$0 "$@" </dev/null 3<&-
code=$?
kill $!
exit $code
"""
BUILT = Path(sys.prefix) / "share" / "cachesvc"  # compiled when this environment was made
PATIENCE_S = 20.0  # of a start that has nothing else to do; compiling takes 8 on a free processor
# The instructions that torch itself uses, as in its own build. Below AVX2 there is no multiply-add.
_FLAGS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": (
        *("-mavx2", "-mfma", "-mf16c"),
        *("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw"),
    ),
}

# TorchScript compiles calls of operators that nothing implements yet.
_library = torch.library.Library("cachesvc", "FRAGMENT")
_library.define("norm(Tensor x, Tensor eps) -> Tensor")
_library.define("silu_mul(Tensor gate, Tensor up) -> Tensor")
_library.define("gelu_mul(Tensor gate, Tensor up) -> Tensor")
_library.define("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor")
_library.define("narrow(Tensor weight) -> Tensor")
_library.define("widen(Tensor narrow) -> Tensor")
_library.define("linear(Tensor rows, Tensor narrow, Tensor? bias, int chain) -> Tensor")
_library.define(
    "attend_rows(Tensor query, Tensor key, Tensor value, int first, int tokens, bool write, "
    "Tensor(a!)[] runs, int[] positions, int key_part, int value_part, int? window, "
    "float scaling, Tensor(b!) output) -> ()"
)
_library.define("copy(Tensor(a!)[] to, Tensor[] source) -> ()")


class OperatorsMissing(Exception):
    """There are no compiled operators here. The message says why."""


class Operators:
    """The compiled operators of one folder. Compiling begins at once, in a process of its own."""

    def __init__(self, folder: Path, built: Path | None = None) -> None:
        """folder: where a compiled library is kept, for this version and these instructions.
        built: another that may have one already."""
        self._capability = torch.backends.cpu.get_cpu_capability()
        self.key = self._key()
        self._folder, self._name = folder, f"operators-{self.key}"
        self._places = [folder]
        if built is not None and built.is_dir() and keeps_others_out(built):
            self._places.append(built)  # else it is as if there were none: what is ours is compiled
        self._compiling: _Compiling | None = None
        self.missing: str | None = None
        self.loaded: Path | None = None  # the library that this process has loaded
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.kept is None:
                self._compiling = _Compiling(self._command(), folder / self._name)
        except (OperatorsMissing, OSError) as error:
            self.missing = str(error)

    @property
    def kept(self) -> Path | None:
        """The library, if a folder has one. Its name ends with the digest of its contents: a
        process that loads a damaged one ends without a word. A file that another user could have
        written, or put there, is not loaded. Raises OperatorsMissing for it."""
        for place in self._places:
            if not keeps_others_out(place):
                raise OperatorsMissing(f"other users may replace what is in {place}")
            for found in place.glob(f"{self._name}-*.so"):
                if not is_own(found.stat()):
                    raise OperatorsMissing(f"{found} is not this user's alone; delete it")
                if found.stem == _stem(self._name, found):
                    return found
                logger.warning("%s is damaged, and compiled again", found)
                if place == self._folder:
                    found.unlink(missing_ok=True)
        return None

    @property
    def is_compiling(self) -> bool:
        return self._compiling is not None and self._compiling.is_at_work

    def load(self, patience_s: float | None = PATIENCE_S) -> bool:
        """Wait until they are compiled, and load them into this process. False, with the reason in
        the log, where there are none. A compiler that is slower goes on, and what it makes is kept
        for the next start. None waits until it is done, or until `close`."""
        try:
            if self.missing is not None:
                raise OperatorsMissing(self.missing)
            if self._compiling is not None:
                self._compiling.wait(patience_s)
            if (kept := self.kept) is None:
                raise OperatorsMissing(f"another process has removed them from {self._folder}")
            torch.ops.load_library(str(kept))
            self.loaded = kept
        except (OperatorsMissing, OSError) as error:
            logger.info("no compiled operators: %s", error.__cause__ or error)
            return False
        return True

    def close(self) -> None:
        """End the compiler if it is still at work."""
        if self._compiling is not None:
            self._compiling.end()

    def _key(self) -> str:
        """A name for what the library depends on."""
        sources = (each.read_bytes() for each in sorted(SOURCE.parent.glob("*.[ch]*")))
        parts = (*sources, torch.__version__.encode(), self._capability.encode())
        return xxhash.xxh3_64_hexdigest(b"\0".join(parts))

    def _command(self) -> list[str]:
        """The compiler's arguments, except for where the library goes."""
        if not compiles_for(self._capability):
            raise OperatorsMissing(f"torch computes with {self._capability} instructions")
        if (compiler := find_compiler()) is None:
            raise OperatorsMissing("this machine has no C++ compiler")
        root = Path(torch.__file__).parent
        return [
            *(compiler, "-std=c++20", "-O3", "-fPIC", "-shared", "-w"),
            *("-ffp-contract=off", "-fno-math-errno"),
            *_FLAGS[self._capability],
            f"-DCPU_CAPABILITY={self._capability}",
            f"-DCPU_CAPABILITY_{self._capability}",
            *(f"-I{root / 'include'}", str(SOURCE)),
            *(f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"),
        ]


def compiles_for(capability: str) -> bool:
    """Whether there are operators for a processor with these instructions, as torch names them."""
    return capability in _FLAGS


def find_compiler() -> str | None:
    """The path of this machine's C++ compiler."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


class _Compiling:
    """A compiler at work in a folder of its own. A thread waits for it, moves what it made into
    place and removes the folder. It ends with this object, or with this process."""

    def __init__(self, command: list[str], library: Path) -> None:
        """library: where it goes, without the digest of its contents and the suffix."""
        self._kept: Future[None] = Future()
        with ExitStack() as held:
            folder = held.enter_context(partial_folder(library, "operators-"))
            with _said(folder).open("wb") as said:
                process = subprocess.Popen(
                    ["sh", "-c", _LEASHED, str(folder), *command, "-o", str(_made(folder))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    start_new_session=True,
                )
            thread = threading.Thread(
                target=_keep,
                args=(process, folder, library, held.pop_all(), self._kept),
                name="compiling-operators",
                daemon=True,
            )
        thread.start()
        self.end = weakref.finalize(self, _kill, process, thread)

    @property
    def is_at_work(self) -> bool:
        return not self._kept.done()

    def wait(self, patience_s: float | None) -> None:
        """Until the library is in place. Raises OperatorsMissing, with the compiler's first error
        if it failed, and OSError."""
        try:
            self._kept.result(patience_s)
        except TimeoutError:
            raise OperatorsMissing(
                f"the C++ compiler is at work after {patience_s:.0f} s, and a later start loads "
                "what it makes"
            ) from None


def _keep(
    process: "subprocess.Popen[bytes]",
    folder: Path,
    library: Path,
    held: ExitStack,
    kept: "Future[None]",
) -> None:
    try:
        with held, process:
            if process.wait() < 0:
                raise OperatorsMissing("the C++ compiler was ended at its work")
            if process.returncode:
                said = _said(folder).read_text(errors="replace")
                signs = ("error", "failed")
                lines = [line for line in said.splitlines() if any(sign in line for sign in signs)]
                errors = lines or [said[-200:]]
                why = errors[0] or f"it says nothing, as on a full disk: see {library.parent}"
                raise OperatorsMissing(f"the C++ compiler failed: {why}")
            made = _made(folder)
            made.chmod(0o755)
            made.replace(library.with_name(f"{_stem(library.name, made)}.so"))
    except (OperatorsMissing, OSError) as error:
        kept.set_exception(error)
    else:
        kept.set_result(None)


def _kill(process: "subprocess.Popen[bytes]", thread: threading.Thread) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    thread.join()


def _made(folder: Path) -> Path:
    return folder / "operators.so"


def _said(folder: Path) -> Path:
    return folder / "errors"


def _stem(name: str, library: Path) -> str:
    return f"{name}-{xxhash.xxh3_64_hexdigest(library.read_bytes())}"

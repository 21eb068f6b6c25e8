"""Compiles grammars, once per tenant, in processes with a limit on CPU time and memory.

`compile` blocks for a while, and longer while the nursery starts. Callers keep it off the event
loop and the engine thread. Compiled grammars and refused ones are remembered.
"""

import contextlib
import hashlib
import json
import logging
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.errors import InvalidParameter, QueueFull
from engine.grammar.matcher import check_installed
from engine.grammar.process import GrammarProcess
from engine.grammar.vocabulary import Vocabulary
from engine.models.describe import Speaking
from engine.structure import Grammar, GrammarSource

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
START_S = 60.0  # the nursery imports torch, which is slow on a busy machine
MAX_KEPT = 32  # processes kept for the next request with their grammar
MAX_PROCESSES = 128  # including those in use by requests in flight
_RUN = "import sys; sys.path.insert(0, sys.argv[1]); from engine.grammar.worker import main; main()"
Known = tuple[str, GrammarSource]  # owner and source


def compiler_for(loaded: Speaking, *, timeout_s: float = TIMEOUT_S) -> "GrammarCompiler":
    """The compiler for a model's vocabulary. Starts nothing."""
    tokenizer, special = loaded.tokenizer, loaded.tokenizer.special_token_ids

    def tokens() -> list[bytes]:
        ids = range(loaded.vocab_size)
        return [b"" if i in special else tokenizer.token_bytes(i) for i in ids]

    return GrammarCompiler(
        tokens,
        loaded.eos_token_ids,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        timeout_s=timeout_s,
    )


class GrammarCompiler:
    """Compiled grammars by their source. Thread-safe; `close` ends the processes.

    `tokens[i]` holds token i's bytes, empty for special tokens. `end` holds the ids that end an
    answer. Owners (such as tenants) share nothing, so one's answers cannot end another's process.
    """

    def __init__(
        self,
        tokens: Callable[[], Sequence[bytes]],
        end: frozenset[int],
        encode: Callable[[str], Sequence[int]],
        *,
        timeout_s: float = TIMEOUT_S,
        max_kept: int = MAX_KEPT,
        max_refused: int = 1024,
    ) -> None:
        """`timeout_s` is CPU time."""
        self._tokens = tokens
        self._end = end
        self._encode = encode
        self._timeout_s = timeout_s
        self._max_kept = max_kept
        self._max_refused = max_refused
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[Known, GrammarProcess] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # the reason, by digest
        self._all: weakref.WeakSet[GrammarProcess] = weakref.WeakSet()
        self._nursery: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._known_lock = threading.Lock()  # guards the remembered grammars; held briefly
        self._start_lock = threading.Lock()  # so that the nursery starts only once

    def known(self, source: GrammarSource, owner: str = "") -> Grammar | None:
        """The grammar, if already compiled. Raises InvalidParameter for one that is known not to
        compile. Never blocks for long."""
        key, refused_as = (owner, source), _digest(owner, source)
        with self._known_lock:
            reason = self._refused.get(refused_as)
            found = self._kept.get(key)
            if found is not None and not found.alive:
                del self._kept[key]
                found = None
            if found is not None:
                self._kept.move_to_end(key)
        if reason is not None:
            raise InvalidParameter(f"{source.field}: {reason}", param=source.field)
        return found

    def compile(self, source: GrammarSource, owner: str = "") -> Grammar:
        """Compile the grammar of `source`.

        Raises InvalidParameter, naming the field, if it is not a grammar, takes too long or is too
        large. Raises QueueFull if too many are in use, and StructureUnavailable without xgrammar.
        """
        check_installed()
        known = self.known(source, owner)
        if known is not None:
            return known
        try:
            made = self._compiled(source)
        except InvalidParameter as error:
            self._refuse(_digest(owner, source), str(error))
            raise InvalidParameter(f"{source.field}: {error}", param=source.field) from None
        with self._known_lock:
            self._kept[owner, source] = made
            while len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        return made

    def close(self) -> None:
        with self._known_lock:
            self._kept.clear()
        with self._start_lock:
            self._end_nursery()

    def _refuse(self, key: bytes, reason: str) -> None:
        with self._known_lock:
            self._refused[key] = reason
            while len(self._refused) > self._max_refused:
                self._refused.popitem(last=False)

    def _compiled(self, source: GrammarSource) -> GrammarProcess:
        with self._known_lock:
            while len(self._all) >= MAX_PROCESSES and self._kept:
                self._kept.popitem(last=False)
            if len(self._all) >= MAX_PROCESSES:
                raise QueueFull(f"{MAX_PROCESSES} grammars are in use, as many as are allowed")
        made = GrammarProcess(*self._forked())
        self._all.add(made)
        made.compile(source, self._timeout_s)
        return made

    # The nursery.

    def _forked(self) -> tuple[Vocabulary, socket.socket]:
        """Fork a new process. Returns the socket that it listens to."""
        while True:
            vocabulary, control = self._running_nursery()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    socket.send_fds(control, [b"+"], [theirs.fileno()])
                except OSError:
                    ours.close()
                    logger.warning("the nursery of grammars has died; another starts")
                    with self._start_lock:
                        self._end_nursery()
                    continue
            return vocabulary, ours

    def _running_nursery(self) -> tuple[Vocabulary, socket.socket]:
        with self._start_lock:
            if self._vocabulary is None:
                if not self._end:
                    raise InvalidParameter(
                        "the model has no end-of-sequence token to end a grammar"
                    )
                self._vocabulary = Vocabulary(self._tokens(), sorted(self._end), self._encode)
            if self._nursery is None or self._nursery.poll() is not None or self._control is None:
                self._end_nursery()
                self._control = self._start_nursery(self._vocabulary)
            return self._vocabulary, self._control

    def _start_nursery(self, vocabulary: Vocabulary) -> socket.socket:
        root = str(Path(__file__).resolve().parents[2])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._nursery = subprocess.Popen(
                [sys.executable, "-c", _RUN, root, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        tokens = [token.decode("latin-1") for token in vocabulary.tokens]
        ours.settimeout(START_S)
        assert self._nursery.stdin is not None
        with contextlib.suppress(OSError):
            self._nursery.stdin.write(
                json.dumps({"tokens": tokens, "end": vocabulary.end}).encode()
            )
            self._nursery.stdin.close()
            if ours.recv(1) == b"+":
                return ours
        ours.close()
        self._end_nursery()
        raise InvalidParameter(
            "the process that compiles grammars does not start on this server; its operator can "
            "see why with: python -c 'import xgrammar'"
        )

    def _end_nursery(self) -> None:
        nursery, self._nursery = self._nursery, None
        control, self._control = self._control, None
        if control is not None:
            control.close()
        if nursery is None:
            return
        nursery.kill()
        nursery.wait()
        if nursery.stdin is not None:
            with contextlib.suppress(OSError):
                nursery.stdin.close()


def _digest(owner: str, source: GrammarSource) -> bytes:
    """The digest by which a refused grammar is remembered. Its text, up to 64 KiB, is not kept."""
    named = f"{owner}\n{source.kind}\n{source.text}".encode(errors="surrogatepass")
    return hashlib.blake2b(named, digest_size=16).digest()

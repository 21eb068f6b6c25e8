"""Grammars compiled, once each, in a child process with a bound on time, memory and size.

`compile` blocks, for at most two times its limit while the child starts; callers keep it off the
event loop and off the engine thread. What is compiled, and what cannot be, is remembered.
"""

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.errors import InvalidParameter
from engine.grammar.matcher import CompiledGrammar, Vocabulary, check_installed
from engine.grammar.worker import HEADER
from engine.models.load import LoadedModel
from engine.structure import Grammar, Source

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
START_S = 60.0  # the child imports torch, which a busy machine takes its time over
MAX_SERIALISED_BYTES = 16 << 20  # of one compiled grammar; reading one of 2.4 MB takes 34 ms
_RUN = "import sys; sys.path.insert(0, sys.argv[1]); from engine.grammar.worker import main; main()"


def compiler_for(loaded: LoadedModel, *, timeout_s: float = TIMEOUT_S) -> "GrammarCompiler":
    """The compiler of a loaded model's vocabulary; starts nothing."""
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
    """Compiled grammars by their source. Thread-safe; `close` ends the child.

    `tokens[i]` are token i's bytes, empty for special ones; `end` the ids that end an answer.
    Remembers up to `cache_bytes` of compiled grammars and as many refusals as grammars.
    """

    def __init__(
        self,
        tokens: Callable[[], Sequence[bytes]],
        end: frozenset[int],
        encode: Callable[[str], Sequence[int]],
        *,
        timeout_s: float = TIMEOUT_S,
        cache_bytes: int = 64 << 20,
        max_cached: int = 1024,
    ) -> None:
        self._tokens = tokens
        self._end = end
        self._encode = encode
        self._timeout_s = timeout_s
        self._cache_bytes = cache_bytes
        self._max_cached = max_cached
        self._vocabulary: Vocabulary | None = None
        self._known: OrderedDict[Source, CompiledGrammar | str] = OrderedDict()
        self._known_bytes = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._known_lock = threading.Lock()  # guards what is remembered; held for moments
        self._child_lock = threading.Lock()  # one source at a time is with the child

    def known(self, source: Source) -> Grammar | None:
        """The grammar if it is compiled already. Raises InvalidParameter for one known not to be
        compilable. Never blocks for long."""
        with self._known_lock:
            found = self._known.get(source)
            if found is None:
                return None
            self._known.move_to_end(source)
        if isinstance(found, str):
            raise InvalidParameter(f"{source.field}: {found}", param=source.field)
        return found

    def compile(self, source: Source) -> Grammar:
        """The grammar of `source`. Raises InvalidParameter, naming the field, for what is no
        grammar, takes too long or is too large, and StructureUnavailable without xgrammar."""
        check_installed()
        with self._child_lock:
            known = self.known(source)
            if known is not None:
                return known
            try:
                made: CompiledGrammar | str = self._made(source)
            except InvalidParameter as error:
                made = str(error)
            self._remember(source, made)
        if isinstance(made, str):
            raise InvalidParameter(f"{source.field}: {made}", param=source.field)
        return made

    def close(self) -> None:
        with self._child_lock:
            self._end_child()

    def _made(self, source: Source) -> CompiledGrammar:
        if self._vocabulary is None:
            if not self._end:
                raise InvalidParameter("the model has no end-of-sequence token to end a grammar")
            self._vocabulary = Vocabulary(self._tokens(), sorted(self._end), self._encode)
        child = self._running_child(self._vocabulary)
        answer = self._ask(child, json.dumps([source.kind, source.text]).encode(), self._timeout_s)
        if answer is None:
            self._end_child()
            raise InvalidParameter(
                f"it cannot be compiled in {self._timeout_s:g} s and the memory allowed; simplify "
                f"it: fewer alternatives, smaller repetitions, less nesting"
            )
        if answer[:1] == b"-":
            raise InvalidParameter(answer[1:].decode())
        return CompiledGrammar(self._vocabulary, answer[1:].decode())

    def _remember(self, source: Source, made: CompiledGrammar | str) -> None:
        with self._known_lock:
            self._known[source] = made
            self._known_bytes += _size(source, made)
            while len(self._known) > 1 and (
                self._known_bytes > self._cache_bytes or len(self._known) > self._max_cached
            ):
                self._known_bytes -= _size(*self._known.popitem(last=False))

    # The child process.

    def _running_child(self, vocabulary: Vocabulary) -> "subprocess.Popen[bytes]":
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end_child()
        root = str(Path(__file__).resolve().parent.parent.parent)
        self._child = subprocess.Popen(
            [sys.executable, "-c", _RUN, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        tokens = [token.decode("latin-1") for token in vocabulary.tokens]
        hello = json.dumps({"tokens": tokens, "end": vocabulary.end}).encode()
        if self._ask(self._child, hello, START_S) != b"+":
            self._end_child()
            raise InvalidParameter(
                "the process that compiles grammars does not start on this server; its operator "
                "may see why with: python -c 'import xgrammar'"
            )
        return self._child

    def _ask(
        self, child: "subprocess.Popen[bytes]", message: bytes, timeout_s: float
    ) -> bytes | None:
        """The child's answer; None when it is not there in time, too long, or the child died."""
        assert child.stdin is not None and child.stdout is not None
        give_up = time.monotonic() + timeout_s
        try:
            child.stdin.write(HEADER.pack(len(message)) + message)
            child.stdin.flush()
        except OSError:
            return None
        header = _read(child.stdout.fileno(), HEADER.size, give_up)
        if header is None:
            return None
        size = HEADER.unpack(header)[0]
        if size > MAX_SERIALISED_BYTES:
            return None
        return _read(child.stdout.fileno(), size, give_up)

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was still to be written to a child that is gone
                logger.debug("the grammar compiler died while it was written to")


def _read(descriptor: int, size: int, give_up: float) -> bytes | None:
    """Exactly `size` bytes of a pipe; None when they are not there by `give_up`, or never."""
    received = bytearray()
    while len(received) < size:
        left_s = give_up - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            return None
        piece = os.read(descriptor, size - len(received))
        if not piece:
            return None
        received += piece
    return bytes(received)


def _size(source: Source, made: CompiledGrammar | str) -> int:
    return len(source.text) + (len(made) if isinstance(made, str) else made.num_bytes)

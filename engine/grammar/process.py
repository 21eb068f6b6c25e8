"""The server's end of a grammar's process; see `engine.grammar.worker`.

Made on the thread that compiles, then used only on the engine thread, which never waits for long. A
sequence whose look has not arrived sits the step out. The process ends with the last reference.
"""

import itertools
import select
import socket
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np

from engine.errors import InvalidParameter
from engine.grammar.matcher import Look
from engine.grammar.state import MatcherState
from engine.grammar.vocabulary import Vocabulary
from engine.structure import GrammarSource

PATIENCE = 12  # how many times its CPU time compiling may take, on a busy machine
MAX_REPLY_BYTES = 1 << 20


class GrammarProcess:
    """A compiled grammar, and the states of the sequences that follow it."""

    def __init__(self, vocabulary: Vocabulary, link: socket.socket) -> None:
        self._vocabulary = vocabulary
        self._link = link
        self._numbers = itertools.count()
        self._asked: dict[int, MatcherState] = {}
        self._ended: deque[int] = deque()  # states no longer in use; any thread adds to it
        self._first: Look | None = None
        self._dead = False
        weakref.finalize(self, link.close)

    @property
    def alive(self) -> bool:
        return not self._dead

    def compile(self, source: GrammarSource, timeout_s: float) -> None:
        """Compile the grammar. Raises InvalidParameter if it is invalid, takes too long or is too
        large."""
        self._link.settimeout(PATIENCE * timeout_s)
        answer = self._exchange(f"{timeout_s} {source.kind} {source.text}".encode())
        if answer == b".":
            answer = self._exchange(None)
            if answer is None:
                raise InvalidParameter("it is too ambiguous: its first token takes too long")
        if answer is None:
            raise InvalidParameter(
                f"it cannot be compiled in {timeout_s:g} s and the memory allowed; simplify it: "
                f"fewer alternatives, smaller repetitions, less nesting"
            )
        if answer[:1] == b"-":
            raise InvalidParameter(answer[1:].decode())
        self._first = Look.unpack(answer[1:])
        if stuck := self.begin(0).stuck:
            raise InvalidParameter(f"it has no answer: {stuck}")
        self._link.setblocking(False)

    def begin(self, min_tokens: int) -> MatcherState:
        assert self._first is not None
        number = next(self._numbers)
        state = MatcherState(
            self._vocabulary, self, self._first, number=number, min_tokens=min_tokens
        )
        weakref.finalize(state, self._ended.append, number)
        return state

    # For states, on the engine thread.

    def ask(self, state: MatcherState, tokens: Sequence[int]) -> None:
        self._asked[state.number] = state
        while self._ended:
            self._send([self._ended.popleft()])
        self._send([state.number, *tokens])

    def wait(self, state: MatcherState, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        while state.number in self._asked and not self._dead and poll.poll(timeout_s * 1000):
            self._receive()
        if self._dead:
            asked, self._asked = self._asked, {}
            for one in asked.values():
                one.received(None)

    def _send(self, numbers: Sequence[int]) -> None:
        try:
            self._link.send(np.array(numbers, dtype=np.int32).tobytes())
        except OSError:  # it has died, or accepts no more messages
            self._dead = True

    def _receive(self) -> None:
        try:
            reply = self._link.recv(MAX_REPLY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            reply = b""
        if not reply:
            self._dead = True
            return
        state = self._asked.pop(int(np.frombuffer(reply[:4], dtype=np.int32)[0]))
        state.received(Look.unpack(reply[4:]))

    def _exchange(self, message: bytes | None) -> bytes | None:
        """The next answer. None if the process has died or takes too long."""
        try:
            if message is not None:
                self._link.send(message)
            return self._link.recv(MAX_REPLY_BYTES) or None
        except OSError:
            return None

"""The processes that compile and match grammars, each with a bound on memory and on CPU time.

`engine.grammar.compiler` starts one process, the nursery. It knows the vocabulary and forks another
process for each grammar. An untrusted grammar may hang its process, fill its memory or crash it.
The kernel then ends it, without effect on others. The limit on time is SIGPROF, a timer of the
process's own CPU time, which other load does not use up. `engine.grammar.process` talks to it over
a socket that preserves message boundaries.

The nursery reads the vocabulary as JSON from stdin, then receives one socket per grammar over its
control socket. A grammar's process gets `seconds kind text`. It answers `.` once compiled, and then
`+` and the first look, or `-` and an error message. After that, each message is a state's number
and its further tokens, and the answer is the number and the look. A number alone ends the state.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import InvalidParameter
from engine.grammar.matcher import Look, Matcher, VocabularyCompiler
from engine.grammar.vocabulary import Vocabulary
from engine.structure import MAX_SOURCE_BYTES, GrammarSource, SourceKind

MEMORY_BYTES = 1 << 30  # of address space beyond that of the process when ready
LOOK_S = 0.5  # CPU time for one look; an ordinary one takes a millisecond
MAX_MESSAGE_BYTES = MAX_SOURCE_BYTES + 1024


def main() -> None:
    given = json.load(sys.stdin)
    control = socket.socket(fileno=int(sys.argv[2]))
    tokens = [token.encode("latin-1") for token in given["tokens"]]
    compiler = VocabularyCompiler(Vocabulary(tokens, given["end"]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps dead children
    control.send(b"+")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            with contextlib.suppress(OSError):  # the requester has gone
                _serve(socket.socket(fileno=descriptors[0]), compiler)
            os._exit(0)
        os.close(descriptors[0])


def _serve(link: socket.socket, compiler: VocabularyCompiler) -> None:
    """Compile one grammar, then match it until it is no longer needed."""
    _bound_memory()
    seconds, kind, text = link.recv(MAX_MESSAGE_BYTES).decode().split(" ", 2)
    _bound_time(float(seconds))
    try:
        compiled = compiler.compile(GrammarSource(SourceKind(kind), text))
    except InvalidParameter as error:
        link.send(b"-" + str(error).encode())
        return
    link.send(b".")
    states: dict[int, Matcher] = {}
    link.send(b"+" + _looked(Matcher(compiler.vocabulary, compiled), []).pack())
    while message := link.recv(MAX_MESSAGE_BYTES):
        number, *further = np.frombuffer(message, dtype=np.int32).tolist()
        if not further:
            states.pop(number, None)
            continue
        if number not in states:
            states[number] = Matcher(compiler.vocabulary, compiled)
        look = _looked(states[number], further)
        link.send(np.int32(number).tobytes() + look.pack())


def _looked(matcher: Matcher, tokens: list[int]) -> Look:
    _bound_time(LOOK_S)
    begun_s = time.process_time()
    look = matcher.follow(tokens)
    _bound_time(0)
    return Look(look.mask, look.text, look.crosses, time.process_time() - begun_s)


def _bound_time(seconds: float) -> None:
    """End this process after `seconds` more of CPU time. 0 removes the bound."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _bound_memory() -> None:
    """Limit this process's memory. Exceeding it raises or aborts, and the server reports either."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit: Any = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

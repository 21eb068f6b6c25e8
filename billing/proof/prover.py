"""The running server's proof of its ledger: made one at a time, the last one kept.

Called off the event loop, by the hourly check and by the admin route. A proof reads every entry: a
million take 18 s, beside a server that goes on.
"""

import threading
import time
from dataclasses import dataclass

from billing.proof import audit
from billing.proof.result import Proof
from billing.store.store import LedgerStore


@dataclass(frozen=True, slots=True)
class Proved:
    """A proof, when it was begun, and what it took."""

    proof: Proof
    at_ns: int
    took_s: float


class Prover:
    """Proves one store. Thread-safe: a caller waits for a running proof, then makes its own."""

    def __init__(self, store: LedgerStore) -> None:
        self._store = store
        self._one_at_a_time = threading.Lock()
        self.last: Proved | None = None

    def prove(self) -> Proved:
        with self._one_at_a_time:
            at_ns, began_s = time.time_ns(), time.monotonic()
            proof = audit.verify(self._store)
            self.last = Proved(proof, at_ns, time.monotonic() - began_s)
            return self.last

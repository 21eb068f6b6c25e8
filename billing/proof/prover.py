"""The running server's proofs of its ledger: one at a time, with the last result kept.

Called off the event loop, by the hourly check and by the admin route. A proof reads every entry: 18
s for a million, while the server runs.
"""

import threading
import time
from dataclasses import dataclass

from billing.proof import audit
from billing.proof.result import Proof
from billing.store.store import LedgerStore


@dataclass(frozen=True, slots=True)
class Proved:
    """A proof, its start and its duration."""

    proof: Proof
    at_ns: int
    took_s: float


class Prover:
    """Proves one store. Thread-safe: a caller waits for a running proof, then runs its own."""

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

"""Asks the same questions cold and in every way that a cache may serve, and compares.

cold          alone, reading no cache: what the others are compared with
cold again    the same once more: where this differs, the server does not repeat itself
cold beside   cold, while others run: where this differs, the batch changes answers, not the cache
first         the first time that the cache is used
repeated      at once again
extended      after only its beginning was asked
together      all of several rounds at once
later         after all others, which pushed it down the tiers

The first round is asked one request at a time. Later ones run side by side, one for each client.
Cold answers are always made alone.
"""

import random
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

from cachesvc.conform.question import Check, Question, ServedAnswer, compare
from cachesvc.conform.target import Target

AGAIN, BESIDE = CONTROLS = ("cold again", "cold beside")  # kinds that read no cache
KINDS = (*CONTROLS, "first", "repeated", "extended", "together", "later")
_ROUND_CASES = 25  # about as many checks a round makes
_Round = tuple[Question, ...]


class Suite:
    def __init__(self, target: Target, rounds: Iterator[_Round], *, clients: int) -> None:
        self._target = target
        self._rounds = rounds
        self._num_clients = clients
        self._expected: dict[Question, ServedAnswer] = {}

    def run(self, cases: int) -> Generator[Check, None, None]:
        """At least `cases` checks, as they are made. A part of them is left for `later`."""
        made, most = 0, 1
        clients = ThreadPoolExecutor(self._num_clients)
        try:
            while (missing := cases - made - len(self._expected)) > 0:
                wave = list(islice(self._rounds, min(most, 1 + missing // _ROUND_CASES)))
                for check in self._wave(wave, clients):
                    made += 1
                    yield check
                most = self._num_clients
            yield from clients.map(self._check, [("later", each) for each in self._expected])
        finally:
            clients.shutdown(wait=False, cancel_futures=True)

    def _wave(self, wave: Sequence[_Round], clients: ThreadPoolExecutor) -> Iterator[Check]:
        longest = [max(asked, key=lambda each: len(each.prompt)) for asked in wave]
        for question in chain.from_iterable(wave):
            self._expected[question] = self._target.ask(question, cold=True)
        for question in longest:
            yield self._check((AGAIN, question))
        yield from chain.from_iterable(clients.map(self._alone, wave))
        mixed = [("together", each) for asked in wave for each in asked]
        mixed += [(BESIDE, each) for each in longest]
        random.Random(len(self._expected)).shuffle(mixed)
        yield from clients.map(self._check, mixed)

    def _alone(self, asked: _Round) -> list[Check]:
        trunk, *others = asked
        kinds = [("first", trunk), ("repeated", trunk)]
        kinds += [(kind, each) for kind in ("extended", "repeated") for each in others]
        return [self._check(each) for each in kinds]

    def _check(self, asked: tuple[str, Question]) -> Check:
        kind, question = asked
        answer = self._target.ask(question, cold=kind in CONTROLS)
        return compare(kind, question, self._expected[question], answer)

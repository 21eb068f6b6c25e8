"""Asks the same questions cold and in every way that a cache may serve, and compares.

cold        alone, reading no cache: what the others are compared with
first       the first time that the cache is used
repeated    at once again
extended    after only its beginning was asked
together    all of a round at once, beside strangers
interleaved in turn with those of the round before
later       after all others, which pushed it down the tiers
restarted   the first time after a restart
"""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, zip_longest

from cachesvc.conform.prompts import Round
from cachesvc.conform.question import Check, Question, ServedAnswer, compare
from cachesvc.conform.target import Target

_NUM_STRANGERS = 3


class Suite:
    """One run against a server. Checks come as they are made; `num_cold` answers were compared
    with."""

    def __init__(self, target: Target, rounds: Iterator[Round], *, clients: int, seed: int) -> None:
        self._target = target
        self._rounds = rounds
        self._clients = clients
        self._draw = random.Random(seed)
        self._expected: dict[Question, ServedAnswer] = {}

    @property
    def num_cold(self) -> int:
        return len(self._expected)

    def run(self, cases: int, restart: Callable[[], None] | None) -> Iterator[Check]:
        """At least `cases` checks. A third of the budget is for `later`, and `restarted`."""
        ways = 2 if restart is not None else 1
        made, before = 0, Round(())
        with ThreadPoolExecutor(self._clients) as clients:
            while made + ways * self.num_cold < cases:
                asked = next(self._rounds)
                for check in self._round(asked, before, clients):
                    made += 1
                    yield check
                before = asked
            yield from self._all("later", clients)
            if restart is not None:
                restart()
                yield from self._all("restarted", clients)

    def _round(self, asked: Round, before: Round, clients: ThreadPoolExecutor) -> Iterator[Check]:
        trunk, *others = asked.questions
        if self._target.cold is None:
            yield from self._without_cold(asked.questions)
        else:
            for question in asked.questions:
                self._expected[question] = self._target.ask(question, cold=True)
            yield self._check("first", trunk)
            yield self._check("repeated", trunk)
            for question in others:
                yield self._check("extended", question)
        for question in others:
            yield self._check("repeated", question)
        yield from self._together(asked.questions, clients)
        turns = zip_longest(asked.questions, before.questions)
        for question in chain.from_iterable(turns):
            if question is not None:
                yield self._check("interleaved", question)

    def _without_cold(self, questions: Sequence[Question]) -> Iterator[Check]:
        """Where nothing makes a request cold, a prompt's first answer is what the later ones are
        compared with. The longest comes first, so that nothing before it is a part of it."""
        for question in sorted(questions, key=lambda each: -len(each.prompt)):
            self._expected[question] = self._target.ask(question)
            yield self._check("repeated", question)

    def _together(self, known: Sequence[Question], clients: ThreadPoolExecutor) -> Iterator[Check]:
        mixed = [*known, *(_stranger(known[-1], self._draw) for _ in range(_NUM_STRANGERS))]
        self._draw.shuffle(mixed)
        answers = clients.map(self._target.ask, mixed)
        for question, answer in zip(mixed, answers, strict=True):
            if question in self._expected:
                yield compare("together", question, self._expected[question], answer)

    def _all(self, kind: str, clients: ThreadPoolExecutor) -> Iterator[Check]:
        questions = list(self._expected)
        answers = clients.map(self._target.ask, questions)
        for question, answer in zip(questions, answers, strict=True):
            yield compare(kind, question, self._expected[question], answer)

    def _check(self, kind: str, question: Question) -> Check:
        answer = self._target.ask(question)
        return compare(kind, question, self._expected[question], answer)


def _stranger(like: Question, draw: random.Random) -> Question:
    """A question of the same length that nobody asks again."""
    if isinstance(like.prompt, str):
        return replace(like, prompt=f"{draw.random()} {like.prompt}")
    shuffled = list(like.prompt)
    draw.shuffle(shuffled)
    return replace(like, prompt=tuple(shuffled))

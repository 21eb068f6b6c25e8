"""Asks the same questions cold and in every way that a cache may serve, and compares.

cold          alone, reading no cache: what the others are compared with
cold again    the same once more: where this differs, the server does not repeat itself
cold beside   cold, while others run: where this differs, the batch changes answers, not the cache
first         the first time that the cache is used
repeated      at once again
extended      after only its beginning was asked
together      all of several rounds at once, beside strangers
interleaved   in turn with those of another round
later         after all others, which pushed it down the tiers
restarted     the first time after a restart
other dtype   after a server with another dtype was asked over the same data

The first round is asked one request at a time. Later ones run side by side, one for each client.
Cold answers are always made alone.
"""

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest

from cachesvc.conform.prompts import Round
from cachesvc.conform.question import Check, Question, ServedAnswer, compare
from cachesvc.conform.target import Target

AGAIN, BESIDE, OTHER_DTYPE = "cold again", "cold beside", "other dtype"
CONTROLS = (AGAIN, BESIDE)  # kinds that read no cache
_NUM_STRANGERS = 3
_ROUND_CASES = 40  # about as many checks a round makes


@dataclass(frozen=True, slots=True)
class Restarts:
    """What the suite can do to the server besides asking. Each ends with the server serving again.
    `as_other_dtype` asks the questions of a server with another dtype over the same data first."""

    plainly: Callable[[], None]
    as_other_dtype: Callable[[Sequence[Question]], None] | None = None


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

    def run(self, cases: int, restarts: Restarts | None) -> Generator[Check, None, None]:
        """At least `cases` checks. A part of them is left for `later` and `restarted`. Closed
        early, it waits for no answer."""
        ways = 2 if restarts is not None else 1
        made, most, before = 0, 1, Round(())
        with ThreadPoolExecutor(self._clients) as clients, ExitStack() as ending:
            ending.callback(self._target.line.hang_up)
            while (missing := cases - made - ways * self.num_cold) > 0:
                wave = list(islice(self._rounds, min(most, 1 + missing // _ROUND_CASES)))
                for check in self._wave(wave, before, clients):
                    made += 1
                    yield check
                most, before = self._clients, wave[-1]
            yield from self._all("later", clients)
            if restarts is not None:
                yield from self._restarted(restarts, clients)

    def _wave(
        self, wave: Sequence[Round], before: Round, clients: ThreadPoolExecutor
    ) -> Iterator[Check]:
        """Rounds side by side."""
        if self._target.cold is None:
            for asked in wave:
                yield from self._without_cold(asked.questions)
        else:
            for asked in wave:
                yield from self._cold(asked)
        yield from chain.from_iterable(clients.map(self._alone, wave))
        yield from self._together(wave, clients)
        beside = [before, *wave[:-1]]
        yield from chain.from_iterable(clients.map(self._interleaved, wave, beside))

    def _cold(self, asked: Round) -> Iterator[Check]:
        """The answers that the others are compared with, and the longest of them again."""
        for question in asked.questions:
            self._expected[question] = self._target.ask(question, cold=True)
        yield self._check(AGAIN, asked.longest, cold=True)

    def _without_cold(self, questions: Sequence[Question]) -> Iterator[Check]:
        """Where nothing makes a request cold, a prompt's first answer is what the later ones are
        compared with. The longest comes first, so that nothing before it is a part of it."""
        for question in sorted(questions, key=lambda each: -len(each.prompt)):
            self._expected[question] = self._target.ask(question)
            yield self._check("repeated", question)

    def _alone(self, asked: Round) -> list[Check]:
        """A round in its own order."""
        trunk, *others = asked.questions
        made = []
        for model in self._target.others:  # whose blocks for these tokens are others
            self._target.ask(trunk, model=model)
        if self._target.cold is not None:
            made = [self._check("first", trunk), self._check("repeated", trunk)]
            made += [self._check("extended", question) for question in others]
        return made + [self._check("repeated", question) for question in others]

    def _together(self, wave: Sequence[Round], clients: ThreadPoolExecutor) -> Iterator[Check]:
        mixed = [("together", each) for asked in wave for each in asked.questions]
        strangers = (_stranger(wave[0].longest, self._draw) for _ in range(_NUM_STRANGERS))
        mixed += [("", each) for each in strangers]
        if self._target.cold is not None:
            mixed += [(BESIDE, asked.longest) for asked in wave]
        self._draw.shuffle(mixed)
        answers = clients.map(lambda each: self._target.ask(each[1], cold=each[0] == BESIDE), mixed)
        for (kind, question), answer in zip(mixed, answers, strict=True):
            if kind:
                yield compare(kind, question, self._expected[question], answer)

    def _interleaved(self, asked: Round, before: Round) -> list[Check]:
        turns = chain.from_iterable(zip_longest(asked.questions, before.questions))
        return [self._check("interleaved", each) for each in turns if each is not None]

    def _restarted(self, restarts: Restarts, clients: ThreadPoolExecutor) -> Iterator[Check]:
        if restarts.as_other_dtype is None:
            restarts.plainly()
            yield from self._all("restarted", clients)
            return
        foreign = next(self._rounds)
        restarts.as_other_dtype(foreign.questions)
        yield from self._all("restarted", clients)
        for question in foreign.questions:
            self._expected[question] = self._target.ask(question, cold=True)
        # The longest first: nothing before it is a part of it.
        for question in sorted(foreign.questions, key=lambda each: -len(each.prompt)):
            yield self._check(OTHER_DTYPE, question)

    def _all(self, kind: str, clients: ThreadPoolExecutor) -> Iterator[Check]:
        questions = list(self._expected)
        answers = clients.map(self._target.ask, questions)
        for question, answer in zip(questions, answers, strict=True):
            yield compare(kind, question, self._expected[question], answer)

    def _check(self, kind: str, question: Question, *, cold: bool = False) -> Check:
        answer = self._target.ask(question, cold=cold)
        return compare(kind, question, self._expected[question], answer)


def _stranger(like: Question, draw: random.Random) -> Question:
    """A question of the same length that nobody asks again."""
    if isinstance(like.prompt, str):
        return replace(like, prompt=f"{draw.random()} {like.prompt}")
    shuffled = list(like.prompt)
    draw.shuffle(shuffled)
    return replace(like, prompt=tuple(shuffled))

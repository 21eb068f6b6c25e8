"""The nine steps of Figure 3 in "SGLang: Efficient Execution of Structured Language Model Programs"
(arXiv 2312.07104), over the real engine and index: two chats, few-shot queries and self-consistency
sampling in one tree of prefixes, with the least recently used leaves evicted.

Blocks hold four tokens; a word is a token, and `~` one that the model chose. Every step is drawn by
the code that serves `cachesvc cache tree`.
"""

import re
from array import array
from collections.abc import Sequence

from cachesvc.cli.cache.tree import Node, tree_lines
from engine.engine import Engine
from engine.request import Request, SamplingParams, StepOutput
from engine.settings import EngineSettings
from tests.support.chain_runner import ChainRunner, chain_layout
from tiers.blocks.keys import CacheScope
from tiers.blocks.tree import TreeQuery, tree_json
from tiers.cache import CacheSettings, TieredCache
from tiers.explore import DiskBlocks, TierForest

BLOCK = 4
NUM_BLOCKS = 15  # so few that steps 5, 8 and 9 must evict
FIRST_WORD = 50  # smaller ids are the model's
SYSTEM = "You are a kind and brief assistant ."
EXAMPLES = "Question : 1 + 1 Answer : 2"


class Figure:
    """An engine without a thread, spoken to in words."""

    def __init__(self) -> None:
        layout = chain_layout(BLOCK)
        settings = CacheSettings(device_bytes=NUM_BLOCKS * layout.nbytes, host_bytes=0)
        self.cache = TieredCache(layout, settings)
        self.runner = ChainRunner(self.cache.pool.tensor, vocab_size=FIRST_WORD)
        self.engine = Engine(self.runner, self.cache, EngineSettings(), self._take)
        self.words: list[str] = []
        self.answers: dict[str, list[int]] = {}
        self.hits: dict[str, int] = {}

    def ask(
        self, name: str, *parts: str | list[int], answer: int, n: int = 1, seed: int = 1
    ) -> list[int]:
        """Queue a prompt of words and of earlier tokens; returns its tokens."""
        tokens = [token for part in parts for token in self._tokens(part)]
        params = SamplingParams(temperature=0, max_tokens=answer, n=n, seed=seed)
        self._submit(name, tokens, params, cache=True)
        return tokens

    def crowd(self, num_tokens: int) -> None:
        """Queue a request that keeps out of the cache and takes room while it runs."""
        params = SamplingParams(temperature=0, max_tokens=2)
        self._submit("crowd", list(range(num_tokens)), params, cache=False)

    def run(self) -> int:
        """Serve what is queued; returns the number of tokens whose KV was computed."""
        before = self.runner.computed
        while self.engine.turn():
            pass
        return self.runner.computed - before

    def draw(self) -> str:
        tree = TierForest(self.cache.index, DiskBlocks()).tree(TreeQuery(num_tokens=100))
        assert tree.num_seen == tree.num_blocks
        lines = list(tree_lines(tree_json(tree), label=self._label))[1:]  # without the scope
        return "\n".join(re.sub(r", \d+ tokens.*", "", line) for line in lines)

    def _submit(self, name: str, tokens: list[int], params: SamplingParams, *, cache: bool) -> None:
        request = Request(
            request_id=name,
            tokens=array("i", tokens),
            params=params,
            scope=CacheScope(),
            cache=cache,
        )
        self.answers[name] = []
        self.engine.submit(request)

    def _take(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            self.answers[output.request_id] += output.tokens
            self.hits[output.request_id] = output.counts.hit

    def _tokens(self, part: str | list[int]) -> list[int]:
        if isinstance(part, list):
            return part
        for word in part.split():
            if word not in self.words:
                self.words.append(word)
        return [FIRST_WORD + self.words.index(word) for word in part.split()]

    def _label(self, node: Node) -> str:
        words = [self.words[t - FIRST_WORD] if t >= FIRST_WORD else "~" for t in node["token_ids"]]
        return f"[{' '.join(words)}]"


def drawn(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.strip().splitlines())


def test_the_nine_steps_of_radix_attention():
    figure = Figure()

    # 1. Nothing is cached.
    assert figure.draw() == ""

    # 2. A chat's first turn, with its answer, is one node.
    turn = figure.ask("chat1", SYSTEM, "Hello there !", answer=2)
    assert figure.run() == len(turn) + 1
    assert figure.draw() == drawn("""
    └─ [You are a kind and brief assistant . Hello there ! ~] 3 blocks
    """)

    # 3. Its second turn reuses all of the first, and is appended.
    turn = figure.ask("chat1 again", turn, figure.answers["chat1"], "Explain this", answer=2)
    assert figure.run() == 4
    chat1 = turn + figure.answers["chat1 again"]
    assert figure.draw() == drawn("""
    └─ [You are a kind and brief assistant . Hello there ! ~ ~ Explain this ~] 4 blocks
    """)

    # 4. A second chat shares the system prompt: the node is split there.
    turn = figure.ask("chat2", SYSTEM, "What is it", answer=2)
    assert figure.run() == 4 and figure.hits["chat2"] == 8
    assert figure.draw() == drawn("""
    └─ [You are a kind and brief assistant .] 2 blocks
       ├─ [Hello there ! ~ ~ Explain this ~] 2 blocks
       └─ [What is it ~] 1 block
    """)

    # 5. It goes on while memory is short: the first chat's second turn is evicted.
    figure.ask("chat2 again", turn, figure.answers["chat2"], "Write code", answer=2)
    figure.crowd(38)
    assert figure.run() == 4 + 39
    assert figure.draw() == drawn("""
    └─ [You are a kind and brief assistant .] 2 blocks
       ├─ [Hello there ! ~] 1 block
       └─ [What is it ~ ~ Write code ~] 2 blocks
    """)

    # 6. A few-shot query shares nothing with the chats: a second node at the root.
    figure.ask("shot2", EXAMPLES, "Question : 2 +", answer=5)
    assert figure.run() == 16
    assert figure.draw() == drawn("""
    ├─ [You are a kind and brief assistant .] 2 blocks
    │  ├─ [Hello there ! ~] 1 block
    │  └─ [What is it ~ ~ Write code ~] 2 blocks
    └─ [Question : 1 + 1 Answer : 2 Question : 2 + ~ ~ ~ ~] 4 blocks
    """)

    # 7. A batch of them shares the examples: the node is split after those. The two words that
    #    begin each question are copied from the first one's block.
    for number in "345":
        figure.ask(f"shot{number}", EXAMPLES, f"Question : {number} +", answer=5)
    assert figure.run() == 3 * (8 - 2)
    assert figure.draw() == drawn("""
    ├─ [You are a kind and brief assistant .] 2 blocks
    │  ├─ [Hello there ! ~] 1 block
    │  └─ [What is it ~ ~ Write code ~] 2 blocks
    └─ [Question : 1 + 1 Answer : 2] 2 blocks
       ├─ [Question : 2 + ~ ~ ~ ~] 2 blocks
       ├─ [Question : 3 + ~ ~ ~ ~] 2 blocks
       ├─ [Question : 4 + ~ ~ ~ ~] 2 blocks
       └─ [Question : 5 + ~ ~ ~ ~] 2 blocks
    """)

    # 8. The first chat goes on: what the second one alone had, used longest ago, is evicted.
    figure.ask("chat1 at last", chat1, "Go on", answer=2)
    assert figure.run() == 8 and figure.hits["chat1 at last"] == 12
    assert figure.draw() == drawn("""
    ├─ [You are a kind and brief assistant . Hello there ! ~ ~ Explain this ~ ~ Go on ~] 5 blocks
    └─ [Question : 1 + 1 Answer : 2] 2 blocks
       ├─ [Question : 2 + ~ ~ ~ ~] 2 blocks
       ├─ [Question : 3 + ~ ~ ~ ~] 2 blocks
       ├─ [Question : 4 + ~ ~ ~ ~] 2 blocks
       └─ [Question : 5 + ~ ~ ~ ~] 2 blocks
    """)

    # 9. More answers to the last question are sampled, three at once: its prompt is computed by
    #    none of them, and the other questions make room.
    figure.ask("more", EXAMPLES, "Question : 5 +", answer=9, n=3, seed=2)
    assert figure.run() == 3 * 8 and figure.hits["more"] == 11
    assert figure.draw() == drawn("""
    ├─ [You are a kind and brief assistant . Hello there ! ~ ~ Explain this ~ ~ Go on ~] 5 blocks
    └─ [Question : 1 + 1 Answer : 2 Question : 5 +] 3 blocks
       ├─ [~ ~ ~ ~] 1 block
       ├─ [~ ~ ~ ~ ~ ~ ~ ~] 2 blocks
       ├─ [~ ~ ~ ~ ~ ~ ~ ~] 2 blocks
       └─ [~ ~ ~ ~ ~ ~ ~ ~] 2 blocks
    """)
    figure.cache.residency.check()

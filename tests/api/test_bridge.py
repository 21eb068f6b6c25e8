"""From the engine's thread to the loop: one crossing per step, nothing lost, nobody disturbed."""

import asyncio
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from api.job import Job
from api.requests.bridge import OutputBridge
from api.requests.generation import Generation
from billing.gate.outcomes import Outcome
from billing.gate.work import insufficient_balance
from engine.request import FinishReason, SamplingParams, StepOutput, Timeline, TokenCounts
from tests.support.wire import byte_model


def output(name, *tokens, **fields):
    fields.setdefault("counts", TokenCounts(prompt=4))
    fields.setdefault("timeline", Timeline(1, 2, 3, 4, 5))
    return StepOutput(name, fields.pop("index", 0), tokens, **fields)


async def test_a_step_crosses_once_however_many_requests_it_served(monkeypatch):
    bridge, loop = OutputBridge(), asyncio.get_running_loop()
    bridge.bind(loop)
    feeds = [bridge.open([f"r{number}"]) for number in range(50)]
    crossings = []
    monkeypatch.setattr(
        loop, "call_soon_threadsafe", lambda call, *args: crossings.append((call, args))
    )
    step = [output(f"r{number}", number) for number in range(50)]
    thread = threading.Thread(target=bridge.deliver, args=(step,))
    thread.start()
    thread.join()
    ((call, args),) = crossings
    call(*args)
    assert [[number] for number in range(50)] == [
        [token for out in await feed.take() for token in out.tokens] for feed in feeds
    ]


async def test_a_slow_reader_finds_all_that_gathered_in_order():
    bridge = OutputBridge()
    bridge.bind(asyncio.get_running_loop())
    feed = bridge.open(["a", "b"])
    for number in range(5):
        bridge.deliver([output("a", number), output("unknown", 9), output("b", number)])
    await asyncio.sleep(0)
    taken = [(out.request_id, out.tokens[0]) for out in await feed.take()]
    assert [(name, number) for number in range(5) for name in "ab"] == taken
    assert [] == await feed.take(idle_s=0.01)
    bridge.close(feed)
    assert 0 == bridge.num_open


async def test_outputs_after_the_event_loop_ended_are_dropped():
    bridge = OutputBridge()
    bridge.bind(asyncio.get_running_loop())
    feed = bridge.open(["a"])
    bridge.unbind()
    bridge.deliver([output("a", 1)])  # bound to no loop
    loop = asyncio.new_event_loop()
    bridge.bind(loop)
    loop.close()
    bridge.deliver([output("a", 1)])  # bound to one that is closed
    await asyncio.sleep(0)
    assert [] == await feed.take(idle_s=0.01)


class SilentEngine:
    """Accepts everything; the test says what comes out."""

    def __init__(self):
        self.aborts = []

    def submit(self, request):
        self.request = request

    def abort(self, request_id, reason=FinishReason.ABORT, index=None):
        self.aborts.append((request_id, reason, index))


REFUSAL = insufficient_balance("acme", needed=1, available=0, currency="CNY")


class Purse:
    """Covers this many output tokens."""

    def __init__(self, tokens):
        self.tokens = tokens

    async def cover(self, output_tokens, progress):
        progress()
        return min(output_tokens, self.tokens)

    @property
    def refusal(self):
        return REFUSAL


async def read(steps, *, n=1, stop=(), purse=10**6, pause_s=0):
    """Feeds the steps to a generation; its texts and finishes by choice."""
    bridge, engine, model = OutputBridge(), SilentEngine(), byte_model()
    bridge.bind(asyncio.get_running_loop())
    params, prompts = SamplingParams(n=n, max_tokens=1000), (model.tokenizer.encode("abcd"),)
    asked = {"prompts": prompts, "params": params, "stop": stop}
    job = Job(request_id="r", model=model, scope=model.scope, **asked)
    generation = Generation(job, Purse(purse), engine=engine, bridge=bridge)
    generation.submit()

    async def deliver():
        for step in steps:
            bridge.deliver(step)
            await asyncio.sleep(pause_s)

    delivering = asyncio.create_task(deliver())
    texts = dict.fromkeys(range(n), "")
    finishes = dict.fromkeys(range(n))
    async for deltas in generation.deltas():
        for delta in deltas:
            assert finishes[delta.choice] is None, "text after the finish"
            texts[delta.choice] += delta.text
            finishes[delta.choice] = delta.finish
    await delivering
    assert 0 == bridge.num_open
    return texts, finishes, generation, engine


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="abcé", max_size=30),
    stop=st.lists(st.text(alphabet="abcé", min_size=1, max_size=3), max_size=2),
    purse=st.integers(0, 60),
    cuts=st.integers(1, 7),
)
def test_the_bill_equals_what_was_sent(text, stop, purse, cuts):
    """Whatever the steps: text up to the stop or the end of the money, each token counted once."""
    raw = text.encode()
    steps = [[output("r", *raw[at : at + cuts])] for at in range(0, len(raw), cuts)]
    steps.append([output("r", 256, finish=FinishReason.STOP, last=True)])
    texts, finishes, generation, _ = asyncio.run(read(steps, stop=tuple(stop), purse=purse))
    billed = generation.served().usage.output
    ends = [at for at in range(1, len(raw) + 1) if any(raw[:at].endswith(s.encode()) for s in stop)]
    assert billed == min(purse, ends[0] if ends else len(raw) + 1)
    if ends and ends[0] <= purse:
        stopped = raw[: ends[0]].decode()
        found = [s for s in stop if stopped.endswith(s)]
        assert texts[0] in {stopped.removesuffix(s) for s in found}
        assert FinishReason.STOP is finishes[0]
    elif purse > len(raw):
        assert (text, FinishReason.STOP) == (texts[0], finishes[0])
    else:
        assert raw[:purse].decode(errors="replace") == texts[0]
        served = generation.served()
        assert FinishReason.LENGTH is finishes[0]
        assert (Outcome.BUDGET, REFUSAL) == (served.outcome, served.refusal)


async def test_choices_that_stop_are_ended_one_by_one():
    steps = [
        [output("r", *b"ab", index=0), output("r", *b"xy", index=1)],
        [output("r", *b"cd", index=0), output("r", *b"zz", index=1)],
        [
            output("r", index=0, finish=FinishReason.STOP),
            output("r", 256, index=1, finish=FinishReason.STOP, last=True),
        ],
    ]
    texts, finishes, _, engine = await read(steps, n=2, stop=("c",), pause_s=0.005)
    assert {0: "ab", 1: "xyzz"} == texts
    assert {0: FinishReason.STOP, 1: FinishReason.STOP} == finishes
    assert [("r", FinishReason.STOP, 0)] == engine.aborts


async def test_an_unrequested_abort_is_a_failure():
    """The engine closes under a request: the client must not take a torn answer for a whole one."""
    end = output("r", finish=FinishReason.ABORT, last=True, error="the server is shutting down")
    texts, finishes, generation, _ = await read([[output("r", *b"ab")], [end]])
    assert ({0: "ab"}, {0: None}) == (texts, finishes)
    served = generation.served()
    assert (Outcome.FAILED, "the server is shutting down") == (served.outcome, served.error)

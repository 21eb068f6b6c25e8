"""A conversation of an agent with tools, turn by turn: how much of each prompt hits.

    python -m tests.bench.agent [--turns 40] [--json FILE]

`cachesvc serve` with the default model. The agent asks, the model must call a tool, the tool's
result goes back, the model answers; every turn sends the whole conversation again, as clients do. A
turn that hits all that the turn before left misses only what is new: the client's own tokens, and
the one token of the last answer that was never computed.

Estimate: 100 new tokens a turn; at turn n the prompt has 100 n, so over 40 turns 95 % hits, and
97 to 98 % in the last ones.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.provenance import commit, machine

SCRIPT = Path(sys.executable).with_name("cachesvc")
READY = re.compile(r"serves (\S+) on (http://[^\s\"]+)")
START_S = 900
ANSWER_TOKENS = 40  # the call takes 34, nearly all of them forced
SYSTEM = "You are a careful assistant for a library. Use the tools to look things up."
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find_book",
            "description": "The shelf and the number of copies of a book.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 99}},
                "required": ["number"],
            },
        },
    }
]


@dataclass(frozen=True, slots=True)
class Told:
    """One request: its prompt, what of it hit, and what the details say of the turn before."""

    prompt: int
    hit: int
    completion: int
    called: bool
    diverged_at: int | None

    @property
    def share(self) -> float:
        return self.hit / self.prompt


def converse(url: str, model: str, num_turns: int, session: str = "agent") -> list[Told]:
    """The conversation: a turn is a question, a forced call, its result, and an answer."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    told = []
    for number in range(num_turns):
        forced = number % 2 == 0
        if forced:
            text = f"Question {number // 2 + 1}: where is book {number * 7 % 99 + 1}?"
            messages.append({"role": "user", "content": text})
        answer = _ask(url, model, messages, session, choice="required" if forced else "none")
        message = answer["choices"][0]["message"]
        messages.append({name: value for name, value in message.items() if value is not None})
        for call in message.get("tool_calls") or ():
            result = f"Shelf {number % 12 + 1}, row {number % 5}, {number % 4 + 1} copies."
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        usage, details = answer["usage"], answer["cachesvc"]
        told.append(
            Told(
                usage["prompt_tokens"],
                usage["prompt_cache_hit_tokens"],
                usage["completion_tokens"],
                bool(message.get("tool_calls")),
                details.get("diverged_at_token"),
            )
        )
    return told


def _ask(
    url: str, model: str, messages: list[dict[str, Any]], session: str, *, choice: str
) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": messages,
        "tools": TOOLS,
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "prompt_cache_key": session,
        "cachesvc": {"details": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, str]]:
    """URL and model's name of a server of the default model."""
    log = folder / "serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [SCRIPT, "serve", "--port", "0", "--data-dir", folder / "data"],
            stdout=out,
            stderr=out,
            # Counts are measured, not times, and one thread waits for no other on a busy machine.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        give_up = time.monotonic() + START_S
        while not (found := READY.search(log.read_text())):
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the server does not start: {log.read_text()}")
            time.sleep(0.1)
        yield found[2], found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def summary(told: list[Told]) -> dict[str, Any]:
    prompt, hit = sum(one.prompt for one in told), sum(one.hit for one in told)
    return {
        "prompt_tokens": prompt,
        "hit_tokens": hit,
        "hit_share": round(hit / prompt, 4),
        "hit_share_last_ten": round(
            sum(one.hit for one in told[-10:]) / sum(one.prompt for one in told[-10:]), 4
        ),
        "turns_that_parted": sum(one.diverged_at is not None for one in told),
        "turns_with_calls": sum(one.called for one in told),
        "turns": [asdict(one) | {"share": round(one.share, 4)} for one in told],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (url, model):
        found = summary(converse(url, model, options.turns))
    print({key: value for key, value in found.items() if key != "turns"})
    if options.json is not None:
        run = {"commit": commit(), "machine": machine(), **found}
        options.json.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()

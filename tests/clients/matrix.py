"""The matrix of clients: which program tries which client, and the README's table of what they did.

    python -m tests.clients.matrix         prints the README's table, from results.json

A program runs in its client's own environment, `.venv-clients/GROUP`, made from
requirements/GROUP.txt (requirements/node for `node`): clients that cannot be installed together
are in groups of their own. A cell is named by its protocol and by what is done.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"
PROTOCOLS = {"chat": "chat completions", "responses": "Responses", "messages": "Messages"}
ALL = "answer stream tools structured"
LIMITED = f"{ALL} limit"
TURNS, PAID = "answer stream tools", "usage limit"


@dataclass(frozen=True, slots=True)
class Program:
    """A client's program: its file, its environment, and what it does by each protocol."""

    file: str
    group: str
    does: Mapping[str, str]

    @property
    def path(self) -> Path:
        return FOLDER / "programs" / self.file

    @property
    def environment(self) -> Path:
        return ROOT / (".venv-vllm" if self.group == "vllm" else f".venv-clients/{self.group}")

    @property
    def interpreter(self) -> Path | str:
        """The environment's; node is the machine's, and what drives a node program is in Python."""
        if self.group == "node":
            return "node" if self.path.suffix == ".mjs" else sys.executable
        return self.environment / "bin" / "python"

    def cells(self) -> list[str]:
        return [f"{by}_{what}" for by, all_ in self.does.items() for what in all_.split()]


def _does(file: str, group: str, **does: str) -> Program:
    return Program(file, group, does)


PROGRAMS = {
    "openai": _does("openai_sdk.py", "frameworks", chat=LIMITED, responses=LIMITED),
    "anthropic": _does("anthropic_sdk.py", "frameworks", messages=f"{LIMITED} cache"),
    "langchain-openai": _does(
        "langchain_chat.py", "frameworks", chat=f"{ALL} {PAID}", responses=f"{TURNS} {PAID}"
    ),
    "pydantic-ai": _does(
        "pydantic_ai_agents.py", "frameworks", chat=ALL, responses=ALL, messages=TURNS
    ),
    "openai-agents": _does("openai_agents_loop.py", "frameworks", chat=ALL, responses=ALL),
    "litellm": _does(
        *("litellm_sdk.py", "litellm"),
        chat=f"{ALL} {PAID}",
        responses=f"answer {PAID}",
        messages="answer limit",
    ),
    "litellm proxy": _does(
        "litellm_proxy.py", "litellm", chat=f"{TURNS} limit", responses="answer", messages="answer"
    ),
    "ai-sdk": _does("ai_sdk.mjs", "node", chat=ALL, responses=ALL, messages=TURNS),
    "codex-cli": _does("codex_cli.py", "node", responses="stream"),
    "vllm bench serve": _does("vllm_bench.py", "vllm", chat="load"),
}


def rows(results: Mapping[str, Any]) -> list[str]:
    """The README's table: what passed, by client and protocol."""
    lines = [f"| client | {' | '.join(PROTOCOLS.values())} |", "| --- |" + " --- |" * 3]
    for name, told in results["clients"].items():
        passed = [cell for cell, line in told["cells"].items() if "seen" in line]
        version = next(iter(told["packages"].values()))
        by = [
            ", ".join(c.partition("_")[2] for c in passed if c.startswith(f"{protocol}_"))
            for protocol in PROTOCOLS
        ]
        lines.append(f"| `{name}` {version} | {' | '.join(by)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(rows(json.loads(RESULTS.read_text(encoding="utf-8")))))

"""codex, the command-line agent, told to use the server: one question, answered without a human."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cells import MODEL, QUESTION, URL, cell, main

PACKAGES = Path(sys.argv[3])  # where npm installed it


def codex(folder, question):
    """Events of a run, and what went wrong. Its own instructions are too long for a small model."""
    short = Path(folder, "short.md")
    short.write_text("You are a helpful assistant.")
    provider = (
        f'{{name="served",base_url="{URL}/v1",wire_api="responses",requires_openai_auth=false}}'
    )
    options = {
        "web_search": '"disabled"',
        "model_instructions_file": f'"{short}"',
        "model": f'"{MODEL}"',
        "model_provider": '"served"',
        "model_providers.served": provider,
    }
    given = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    command = [PACKAGES / "node_modules/.bin/codex", "exec", "--json", "--skip-git-repo-check"]
    return subprocess.run(
        [*command, "--sandbox", "read-only", *given, question],
        cwd=folder,
        env={**os.environ, "CODEX_HOME": str(folder), "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )


@cell
def responses_stream():
    with tempfile.TemporaryDirectory() as folder:
        first, second = (turn(codex(folder, question)) for question in (QUESTION, "And of Italy?"))
    cached, tokens = second["cached_input_tokens"], second["input_tokens"]
    assert cached >= 0.95 * min(tokens, first["input_tokens"])
    return f"{tokens} tokens in, of which {cached} cached in a second session"


def turn(done):
    """What its one turn used."""
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    completed = [event for event in events if event["type"] == "turn.completed"]
    assert done.returncode == 0 and completed, done.stdout + done.stderr
    said = [event["item"] for event in events if event["type"] == "item.completed"]
    assert any(item["type"] == "agent_message" and item["text"] for item in said), said
    return completed[0]["usage"]


if __name__ == "__main__":
    package = PACKAGES / "node_modules/@openai/codex/package.json"
    main(**{"@openai/codex": json.loads(package.read_text())["version"]})

"""`vllm bench serve`, which loads a server with random prompts and counts what comes back."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from cells import MODEL, URL, cell, main
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NUM_PROMPTS = 8
WORDS = ("a", "river", "town", "north", "of", "the", "old", "bridge", "nine", "boats", "wait")


def tokenizer(folder):
    """A small one of words, to make prompts of."""
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(folder)
    return folder


@cell
def chat_load():
    with tempfile.TemporaryDirectory() as folder:
        command = [Path(sys.executable).with_name("vllm"), "bench", "serve", "--base-url", URL]
        served = ["--model", MODEL, "--tokenizer", tokenizer(Path(folder, "tokenizer"))]
        asked = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
        sizes = ["--random-input-len", "32", "--random-prefix-len", "32"]
        given = ["--dataset-name", "random", "--random-output-len", "8", *sizes]
        load = ["--num-prompts", str(NUM_PROMPTS), "--max-concurrency", "4"]
        saved = ["--save-result", "--result-dir", folder, "--result-filename", "found.json"]
        done = subprocess.run(
            [*command, *served, *asked, *given, *load, *saved],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
        found = json.loads(Path(folder, "found.json").read_text())
    assert found["completed"] == NUM_PROMPTS and not found["failed"], found
    return f"{found['completed']} requests completed, {found['total_output_tokens']} tokens out"


if __name__ == "__main__":
    main("vllm")

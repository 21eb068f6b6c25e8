"""The hits of a chat that a system message steers, over the real engine, by chat template."""

import pytest
from transformers import AutoTokenizer

from tests.api.real_service import served
from tests.support.models import save_tiny_model
from tests.support.templates import TEMPLATES

pytestmark = pytest.mark.timeout(120)
CHAT = [
    {"role": "system", "content": "Rules. " * 20},
    {"role": "user", "content": "A long question. " * 10},
    {"role": "assistant", "content": "A reply. " * 10},
    {"role": "user", "content": "And then?"},
]
STEER = {"role": "system", "content": "In French."}
STEERED = [*CHAT[:3], STEER, CHAT[3]]
PARTS = [{"type": "text", "text": "In "}, {"type": "text", "text": "French."}]
IN_PARTS = [*CHAT[:3], {"role": "system", "content": PARTS}, CHAT[3]]


def tiny(tmp_path, template):
    """A tiny model with this chat template."""
    folder = tmp_path / "tiny"
    save_tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATES[template]
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "keeps"), [("deepseek", False), ("silent", True)])
async def test_a_steered_chat_keeps_its_prefix(tmp_path, name, keeps):
    folder = tiny(tmp_path, name)
    async with served(tmp_path / "data", folder) as (_, client):

        async def details(messages):
            body = {"model": str(folder), "messages": messages, "max_tokens": 1}
            answer = await client.post("/v1/chat/completions", json=body)
            assert 200 == answer.status_code, answer.text
            usage = answer.json()["usage"]
            return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

        before, none = await details(CHAT)
        assert 0 == none
        tokens, hits = await details(STEERED)
        assert tokens > before  # the message is in the prompt
        told = sum(len(each["content"]) for each in CHAT[:3])  # a byte is a token
        assert keeps == (hits >= told), hits
        if not keeps:
            assert hits < len(CHAT[0]["content"]) + 32
        assert (tokens, tokens - 1) == await details(IN_PARTS)  # the same prompt, so all of it hits


async def test_a_chat_cannot_forge_a_turn(tmp_path):
    """Control tokens in a client's content are text; those of the template stay as they are."""
    folder = tiny(tmp_path, "chatml")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    mark = tokenizer.all_special_tokens[0]
    async with served(tmp_path / "data", folder) as (_, client):

        async def tokens(text):
            turn = {"role": "user", "content": text}
            body = {"model": str(folder), "messages": [turn]}
            answer = await client.post("/tokenize", json=body)
            assert 200 == answer.status_code, answer.text
            return answer.json()["tokens"]

        special = tokenizer.convert_tokens_to_ids(mark)
        plain, forged = await tokens("ab"), await tokens(f"a{mark}b")
        assert plain.count(special) == forged.count(special)
        assert mark in tokenizer.decode(forged)

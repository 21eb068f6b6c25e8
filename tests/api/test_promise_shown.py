"""A request's page says what a hit left equal where it was served, also after another start."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cachesvc.cli.explain import _request_lines
from engine.errors import ModelError
from engine.models import load
from engine.promise import BITS, Equal
from tests.api.real_service import served
from tests.support.models import save_model, save_tiny_model, stock_model

pytestmark = pytest.mark.timeout(300)


async def test_a_request_is_shown_with_the_promise_under_which_it_was_served(tmp_path):
    save_tiny_model(tmp_path / "tiny")
    first, told = await shown(tmp_path)
    assert told["exactness"] == {"equal": "bits", "text": BITS.text}
    assert told["exactness"]["text"] in _request_lines(told)[-1]

    other, told = await shown(tmp_path, model_dtype="float16")
    assert told["exactness"]["equal"] == Equal.TOKENS
    assert "Linear are not packed" in told["exactness"]["text"]
    async with served(tmp_path / "data", tmp_path / "tiny") as (service, client):
        headers = {"Authorization": f"Bearer {service.dashboard.parts.operator_token}"}
        pages = [
            await client.get(f"/admin/requests/{each}", headers=headers) for each in (first, other)
        ]
    assert "equal bits" in pages[0].text and BITS.text in pages[0].text
    assert "equal tokens" in pages[1].text and "Greedy tokens are equal" in pages[1].text


@pytest.mark.parametrize("compiled", [True, False])
async def test_bits_are_promised_to_many_threads_where_operators_are_compiled(
    tmp_path, operators, monkeypatch, compiled
):
    """torch cuts 511 rows of 160 numbers into three shares, whose ends are not its vectors'."""
    model = LlamaForCausalLM(
        LlamaConfig(**stock_model().config.to_dict() | {"intermediate_size": 160})
    )
    save_model(tmp_path / "tiny", model)
    monkeypatch.setattr(load, "_COMPILED_FROM_BYTES", 0 if compiled else 1 << 40)
    monkeypatch.setattr(load, "Operators", lambda folder: operators)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        _, told = await shown(tmp_path)
        assert told["exactness"]["equal"] == (Equal.BITS if compiled else Equal.TOKENS)
        if not compiled:
            torch.set_num_threads(3)  # the engine had no more than there are processors
            with pytest.raises(ModelError, match="activations of 160 numbers depend"):
                await shown(tmp_path, model_exact="always")
    finally:
        torch.set_num_threads(before)


async def shown(folder: Path, **settings: Any) -> tuple[str, dict[str, Any]]:
    """The id of a request that a server answered, and what it says of it."""
    async with served(folder / "data", folder / "tiny", **settings) as (_, client):
        body = {"model": str(folder / "tiny"), "prompt": "Call me Ishmael. ", "max_tokens": 2}
        answer = (await client.post("/v1/completions", json=body)).json()
        told = (await client.get(f"/v1/cache/requests/{answer['id']}")).json()
        return told["id"], told

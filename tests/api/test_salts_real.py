"""A salt over the real engine: blocks apart within a tenant, and still the tenant's to purge."""

import pytest

from tests.api.real_service import served
from tests.support.models import save_tiny_model

pytestmark = pytest.mark.timeout(120)
PROMPT = [number * 7 % 250 for number in range(300)]


async def test_salts_share_no_block_and_are_purged_with_their_tenant(tmp_path):
    save_tiny_model(tmp_path / "tiny")
    async with served(tmp_path / "data", tmp_path / "tiny") as (service, client):

        async def hits(**fields: str) -> int:
            body = {"model": str(tmp_path / "tiny"), "prompt": PROMPT, "max_tokens": 1}
            answer = await client.post("/v1/completions", json=body | fields)
            assert 200 == answer.status_code, answer.text
            usage = answer.json()["usage"]
            assert len(PROMPT) == usage["prompt_tokens"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        ways: list[dict[str, str]] = [
            {},
            {"cache_salt": "a"},
            {"cache_salt": "b"},
            {"user_id": "a"},
        ]
        assert [0, 0, 0, 0] == [await hits(**fields) for fields in ways]
        for fields in ways:
            assert len(PROMPT) - 1 == await hits(**fields), fields
        order = {"kind": "tenant", "name": "default", "why": "the customer asked"}
        headers = {"Authorization": f"Bearer {service.dashboard.parts.operator_token}"}
        purged = await client.post("/admin/api/cache/purge", json=order, headers=headers)
        assert 200 == purged.status_code, purged.text
        assert 0 == purged.json()["blocks_left"]
        assert [0, 0, 0, 0] == [await hits(**fields) for fields in ways]

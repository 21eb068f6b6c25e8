"""The certificate on `/v1/models` and the overview: valid for what is served, and else why not."""

from pathlib import Path
from typing import Any

import pytest

from cachesvc.server.certificate import NONE_YET, certify
from tests.api.real_service import served
from tests.support.models import save_tiny_model

pytestmark = pytest.mark.timeout(300)
TOLD = {"cases": 4321, "flips": 0, "moves": 0, "largest_move": 0.0, "kinds": {}, "tiers": {}}


async def shown(folder: Path, **settings: Any) -> tuple[dict[str, Any], str]:
    """The model's `exactness`, and the overview's page."""
    async with served(folder / "data", folder / "tiny", **settings) as (service, client):
        headers = {"Authorization": f"Bearer {service.dashboard.parts.operator_token}"}
        page = await client.get("/admin", headers=headers)
        assert 200 == page.status_code
        models = (await client.get("/v1/models")).json()["data"]
        assert (await client.get(f"/v1/models/{models[0]['id']}")).json() == models[0]
        exactness: dict[str, Any] = models[0]["exactness"]
        return exactness, page.text


async def test_a_certificate_is_shown_for_what_it_was_made_for_alone(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "tiny")
    told, page = await shown(tmp_path)
    assert (told["valid"], told["why"]) == (False, NONE_YET) and "not certified" in page
    certify(tmp_path / "data", told["serves"], TOLD, {})

    told, page = await shown(tmp_path)
    assert told["valid"] and told["certificate"]["cases"] == 4321
    assert "0 flips of 4,321 cases" in page and "not certified" not in page

    told, page = await shown(tmp_path, model_dtype="bfloat16")
    assert not told["valid"] and "it is for dtype float32, and bfloat16 serves" in told["why"]
    assert "not certified" in page and "bfloat16 serves" in page

    other = tmp_path / "other"
    other.mkdir()
    save_tiny_model(other / "tiny", seed=9)
    (tmp_path / "data").rename(other / "data")
    told, _ = await shown(other)
    assert told["certificate"] is None  # other weights under another name

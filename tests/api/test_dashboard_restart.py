"""The dashboard over a restart of the real service: the requests are still there."""

from tests.api.real_service import served
from tests.support.models import save_tiny_model
from tiers.errors import FAULTS

PERSON = {"accept": "text/html"}


async def test_a_restart_loses_nothing_that_an_admin_saw(tmp_path, tmp_path_factory):
    model = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(model)
    data_dir = tmp_path / "data"
    async with served(data_dir, model) as (service, client):
        body = {"model": str(model), "prompt": "Call me Ishmael. " * 8, "max_tokens": 4}
        answer = (await client.post("/v1/completions", json=body)).json()
        request_id = answer["id"].removeprefix("cmpl-")
    async with served(data_dir, model) as (service, client):
        client.headers["authorization"] = f"Bearer {service.dashboard.parts.operator_token}"
        page = await client.get("/admin/requests", headers=PERSON)
        assert request_id[:8] in page.text
        faults = (await client.get("/admin/cache", headers=PERSON)).text
        assert all(f"tiers.disk.faults.{reason}" in faults for reason in FAULTS)
        assert (
            200 == (await client.get(f"/admin/requests/{request_id}", headers=PERSON)).status_code
        )

"""A service whose ledger takes nothing more says that it is not ready."""

import sqlite3
from contextlib import closing

import anyio

from tests.api.real_service import served
from tests.support.models import save_tiny_model


async def test_a_ledger_that_refuses_is_not_ready(tmp_path):
    """A newer version changed it meanwhile: probes send no more requests here."""
    save_tiny_model(tmp_path / "model")
    data_dir = tmp_path / "data"
    async with served(data_dir, tmp_path / "model") as (_, client):
        assert 200 == (await client.get("/health/ready")).status_code
        with closing(sqlite3.connect(data_dir / "ledger.sqlite3")) as plain:
            plain.execute("UPDATE meta SET value = x'39' WHERE name = 'schema'")
            plain.commit()
        with anyio.fail_after(60):
            while (answer := await client.get("/health/ready")).status_code == 200:
                await anyio.sleep(0.05)
        assert 503 == answer.status_code
        assert "start this server again with that version" in answer.text

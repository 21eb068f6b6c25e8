"""GET /v1/receipts/keys: the public keys that receipts are checked with."""

from fastapi import APIRouter, Request

from api.context import authorised, wire_of
from billing.keys import Scope

router = APIRouter(tags=["receipts"])


@router.get("/v1/receipts/keys")
async def receipt_keys(request: Request) -> dict[str, list[dict[str, str]]]:
    """Every key that ever signed here, in hex (Ed25519, 32 bytes); a receipt names its `key_id`."""
    await authorised(request, Scope.USAGE)
    keys = wire_of(request).receipt_keys
    return {"keys": [{"key_id": name, "public_key": key} for name, key in keys.items()]}

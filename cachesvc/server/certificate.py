"""A certificate of exactness: what was served, how many answers were compared, and a signature.

`cachesvc conform --offline` writes it into a data directory, signed with the key of its receipts.
The server of that directory shows it where what it serves is what was certified. A customer checks
it with the public key, and can repeat the run. Signing and checking import cryptography.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tiers.blocks.keys import CacheScope

FOLDER = "certificates"  # of a data directory
NONE_YET = "no certificate was made for what serves"
_CONTENTS = ("weights", "tokenizer", "adapter", "layout", "arithmetic")  # digests, in hex

Identity = Mapping[str, str]


def identity(model: str, facts: Mapping[str, str], scope: CacheScope) -> Identity:
    """What serves `model`: `facts` of the engine, and digests of all that its blocks depend on
    besides tokens and tenant."""
    contents = {name: value.hex() for name, value in asdict(scope).items() if name in _CONTENTS}
    return {"model": model, **facts, **contents}


def differences(certified: Identity, served: Identity) -> list[str]:
    """In what the two differ, in sentences. Their names for the model do not count."""
    said = []
    for name in dict.fromkeys((*certified, *served)):
        was, now = certified.get(name), served.get(name)
        if was == now or name == "model":
            continue
        if name in _CONTENTS:
            said.append(f"it is for other contents of: {name}")
        else:
            said.append(f"it is for {name} {was or 'unknown'}, and {now or 'unknown'} serves")
    return said


def certify(
    data_dir: Path, served: Identity, report: Mapping[str, Any], settings: Mapping[str, Any]
) -> Path:
    """Writes the signed certificate of a run that found no fault and gave this `report`."""
    from billing.reports.receipts import Purpose, ReceiptSigner

    numbers = {name: report[name] for name in ("cases", "flips", "moves", "kinds", "tiers")}
    largest = report["largest_move"]
    document = {
        "serves": dict(served),
        **numbers,
        "largest_move": None if largest is None else repr(largest),  # no floats are signed
        "settings": dict(settings),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    signed = ReceiptSigner.open(data_dir).sign(document, Purpose.CERTIFICATE)
    path = data_dir / FOLDER / f"{_name(served)}.json"
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(signed, indent=1) + "\n")
    fresh.replace(path)
    return path


def is_genuine(certificate: Mapping[str, Any], keys: Mapping[str, str]) -> bool:
    """Whether one of the public keys, in hex by id, signed exactly this certificate."""
    from billing.reports.receipts import Purpose, verify_signed

    try:
        key = bytes.fromhex(keys[certificate["key_id"]])
    except (KeyError, ValueError, TypeError):
        return False
    return verify_signed(dict(certificate), key, Purpose.CERTIFICATE)


def shown(data_dir: Path, keys: Mapping[str, str], served: Identity) -> dict[str, Any]:
    """What a server tells of its exactness: what serves, the certificate that fits it best, and
    whether that is valid, or why not."""
    genuine = [each for each in _read(data_dir / FOLDER) if is_genuine(each, keys)]
    close = [each for each in genuine if _concerns(each["serves"], served)]
    best = min(close, key=lambda each: len(differences(each["serves"], served)), default=None)
    why = [NONE_YET] if best is None else differences(best["serves"], served)
    return {
        "serves": dict(served),
        "certificate": best,
        "valid": not why,
        "why": "; ".join(why) or None,
    }


def _concerns(certified: Identity, served: Identity) -> bool:
    return any(certified.get(name) == served[name] for name in ("model", "weights"))


def _name(served: Identity) -> str:
    """A file name of its own for each identity."""
    return hashlib.sha256(json.dumps(dict(served), sort_keys=True).encode()).hexdigest()[:16]


def _read(folder: Path) -> Iterable[dict[str, Any]]:
    """The certificates in a folder, the newest first. What is none is passed over."""
    found = []
    for path in folder.glob("*.json"):
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(document, dict) and isinstance(document.get("serves"), dict):
            found.append(document)
    return sorted(found, key=lambda each: str(each.get("made_at")), reverse=True)

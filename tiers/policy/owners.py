"""The owner of each scope, for quotas. The server, which knows the names, sets them; the tiers'
threads read them.

If there is a folder, the names are saved in a file there. Blocks found at the next start are then
counted for their owners at once.
"""

import json
import logging
from collections.abc import Hashable, Mapping
from pathlib import Path

from tiers.blocks.keys import PrefixKey

logger = logging.getLogger(__name__)

FILE_NAME = "owners.json"
SCOPE = "scope:"  # prefix of the name of an unnamed owner


class ScopeOwners:
    """Names by scope. A scope without a name is its own owner."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = folder / FILE_NAME if folder is not None else None
        self._names: dict[PrefixKey, str] = _read(self._path) if self._path is not None else {}

    def learn(self, names: Mapping[PrefixKey, str]) -> bool:
        """Add these names. Returns whether anything changed."""
        fresh = {**self._names, **names}
        if fresh == self._names:
            return False
        self._names = fresh
        if self._path is not None:
            self._save(self._path)
        return True

    def of(self, scope: Hashable) -> str | None:
        """The owner of a scope, for `QuotaShares`. None if `scope` is not a scope."""
        if not isinstance(scope, bytes):
            return None
        return self._names.get(PrefixKey(scope)) or f"{SCOPE}{scope.hex()[:16]}"

    def names(self) -> Mapping[PrefixKey, str]:
        return self._names

    def _save(self, path: Path) -> None:
        names = {scope.hex(): name for scope, name in self._names.items()}
        fresh = path.with_name(f"{FILE_NAME}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(names, indent=1) + "\n")
            fresh.replace(path)
        except OSError as error:
            logger.warning(f"whose blocks are whose is not kept for the next start: {error}")


def _read(path: Path) -> dict[PrefixKey, str]:
    """The saved names. Empty if there is no file or it cannot be read."""
    try:
        names = json.loads(path.read_text())
        return {PrefixKey(bytes.fromhex(scope)): str(name) for scope, name in names.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        logger.warning(f"{path} cannot be read: {error}; scopes are named anew")
        return {}

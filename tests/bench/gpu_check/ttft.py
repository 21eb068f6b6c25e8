"""Time to first token of a question about a document, cold and from each tier, as `cachesvc bench`.

An 8B shape in bfloat16 keeps 128 KiB a token. Of 16k tokens, cold computes 2 x 8e9 x 16k operations
and its attention, 0.5 s at half of 990 TFLOP/s. A hit on the host moves 2.1 GB, 40 ms at 55 GB/s.
One on disk reads and expands as much: a second at 2 GB/s.
"""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.gpu_check.device import TINY, described, random_model, shape


def check(device: str, small: bool) -> dict[str, Any]:
    try:
        from cachesvc.bench import Scenario
        from cachesvc.config.sections import EngineSection
        from engine.operators.library import Operators
        from tiers.disk.format.planes import use_library
    except ModuleNotFoundError as error:  # a bare machine
        return {"skipped": f"{error.name} is not installed"}
    sizes = (256,) if small else (4 << 10, 16 << 10)
    config = TINY if small else shape(32, 4096, 32, 8, 14336, 2 * sizes[-1])
    with tempfile.TemporaryDirectory() as folder:
        operators = Operators(Path(folder) / "models")  # as a server compiles them at its start
        library = operators.loaded if operators.load() else None
        compiled = library is not None and use_library(library)
        scenario = Scenario(
            described(random_model(config, device), device),
            kv_dtype="auto",
            data_dir=Path(folder),
            engine=EngineSection(),
            block_size=0,
            largest=sizes[-1],
            repeats=1 if small else 3,
        )
        found = [asdict(each) for each in scenario.run(sizes, lambda _: None)]
    wrong = [each for each in found if each["case"] != "cold" and each["hit_tokens"] == 0]
    return {"what": "hits from every tier", "ok": not wrong, "compiled": compiled, "results": found}

"""`python -m tiers.disk.recovery SHARD MAP_BYTES`: checks a shard.

Writes the report, pickled, to standard output for `ShardCheck`, its only caller.
"""

import os
import pickle
import sys
from pathlib import Path

from tiers.disk.recovery.check import check_shard


def main() -> None:
    os.nice(10)
    report = check_shard(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.buffer.write(pickle.dumps(report))


if __name__ == "__main__":
    main()

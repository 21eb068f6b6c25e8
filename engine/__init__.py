"""Token ids in, token ids out: scheduler, paged attention, runner. Knows no HTTP and no money.

The import sets how OpenMP's threads wait (`engine.openmp`), which has to happen before torch is
loaded. It loads no torch itself.
"""

import os

from engine import openmp

openmp.configure(os.environ)  # noqa: TID251  before any module here imports torch

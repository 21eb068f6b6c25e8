"""Compiles the operators into this environment: `python -m engine.operators`.

Then no first start of a data directory waits for a compiler. Fails without a compiler, with its
reason, and a start then computes without them.
"""

import logging
import sys

from engine.operators.library import BUILT, Operators

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(not Operators(BUILT).load(patience_s=None))

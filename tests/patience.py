"""How long the tests wait for a real program. It ends a test that hangs, and asserts no speed."""

PATIENCE_S = 600.0  # beside twenty busy processes on two cores, importing torch took 70 s

"""Imported, it has imported what a server needs, as `cachesvc serve` does."""

from engine.lean import without_training

with without_training():
    import cachesvc.cli.serve
    import cachesvc.server.compute
    import cachesvc.server.engines
    import cachesvc.service  # noqa: F401

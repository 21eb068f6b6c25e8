"""What an engine's own metrics say, in Prometheus' text format."""

import contextlib
import re
from collections import defaultdict

_SAMPLE = re.compile(r"^([a-z_:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def counters_in(text: str) -> dict[str, float]:
    """Prometheus samples by name, over all labels."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, _, value in _SAMPLE.findall(text):
        with contextlib.suppress(ValueError):
            sums[name] += float(value)
    return dict(sums)


def labels_in(text: str, name: str) -> dict[str, str]:
    """The labels of the first sample of this name."""
    found = next((labels for each, labels, _ in _SAMPLE.findall(text) if each == name), "")
    return dict(_LABEL.findall(found))

"""The frame of a client's program, which runs in the client's own environment.

    python PROGRAM.py URL MODEL [FOLDER]     a line of JSON for each cell: what it saw, or why not

A cell is one thing that the client does against the server. It asserts what it says of itself, and
returns what it saw. Nothing of the server is imported here.
"""

import asyncio
import inspect
import json
import sys
import traceback
import uuid
from functools import partial
from importlib.metadata import version

CELLS = {}
URL, MODEL = sys.argv[1:3]  # the server's URL, without /v1
QUESTION = "What is the capital of France?"
ASKED = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["rome", "paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ABOUT = {"name": "weather", "description": "The weather in a city."}
TOOL = {"type": "function", "function": {**ABOUT, "parameters": SCHEMA}}
SPENT = "spent-out"  # a user whose hard limit any request would pass


def cell(function):
    CELLS[function.__name__] = function
    return function


def table(by, **functions):
    """A cell for each protocol and thing to do. `by` says what a protocol's cells are given."""
    for protocol, given in by.items():
        for what, function in functions.items():
            CELLS[f"{protocol}_{what}"] = partial(function, given)


def rules():
    """Instructions that nobody has sent before."""
    return f"These are the rules of {uuid.uuid4()}. " + "Be brief. " * 60


def told(limit, code, headers):
    """What the client knows of the limit that refused it; the same of every protocol."""
    assert code == "spend_limit_reached" and limit["value"] == SPENT
    assert int(headers["retry-after"]) > 0 and headers["x-should-retry"] == "false"
    return f"{code}: {limit['name']} of {limit['of']} {limit['value']} until {limit['ends_at']}"


def main(*packages, **versions):
    """Run every cell, also after one has failed; name the packages that are tried."""
    versions |= {name: version(name) for name in packages}
    print(json.dumps({"packages": versions}), flush=True)
    with asyncio.Runner() as runner:
        for name, function in CELLS.items():
            print(json.dumps({"cell": name, **_ran(function, runner)}, default=str), flush=True)


def _ran(function, runner):
    try:
        seen = function()
        return {"seen": runner.run(seen) if inspect.iscoroutine(seen) else seen}
    except BaseException:  # noqa: BLE001 - whatever the client raises is the result
        return {"error": traceback.format_exc()[-3000:]}

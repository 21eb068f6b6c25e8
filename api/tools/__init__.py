"""Parsing a model's text, by the style of its chat template: reasoning, prose, tool calls.

Pure and incremental: one parser per style, no HTTP, no tokens. `api.shapes` writes the calls in
each protocol.
"""

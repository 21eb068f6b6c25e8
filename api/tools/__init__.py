"""What a model's text means, by the style of its chat template: reasoning, prose, tool calls.

Pure and incremental: one parser a style, no HTTP, no tokens. What the calls become on the wire is
in `api.shapes`.
"""

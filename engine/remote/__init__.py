"""An engine at a URL: vLLM or SGLang, which take and give token ids over HTTP.

`engine` has the interface of `engine.engine.Engine`. A file is a protocol. No money, and no server.
"""

"""Requests that pass to an endpoint which speaks a client's protocol and gives no token ids.

A file is a stage: the `body` that goes up, the `passage` of the answer that comes down, its `usage`
in our classes. What is held and charged is the business of `api.requests`, as for every answer.
"""

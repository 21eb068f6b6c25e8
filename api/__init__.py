"""The wire: OpenAI-compatible routes, auth, streaming, errors; where engine and money meet."""

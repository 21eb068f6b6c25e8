"""The wire: OpenAI-compatible routes, auth, streaming, errors and admin pages; where engine and money meet."""

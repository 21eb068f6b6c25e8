"""Images: files become tiles and placeholder tokens, and tiles become rows of the prompt.

A model's own vision tower computes the rows, on a thread beside the engine's. The scheduler decides
whether an image is computed at all, since the cached part of a prompt needs none of its images.
"""

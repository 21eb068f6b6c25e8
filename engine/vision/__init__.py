"""Images: a file to tiles and placeholder tokens, tiles through a model's own vision tower to rows
of the prompt, on a thread beside the engine's. Whether an image is computed at all, the scheduler
decides: what the cache holds of a prompt needs none of its images.
"""

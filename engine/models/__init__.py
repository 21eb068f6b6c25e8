"""Models, weights and adapters: found, converted, loaded and checked.

The model definitions themselves are those of transformers.
"""

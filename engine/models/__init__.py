"""Finds, converts, loads and checks models, weights and adapters.

The model definitions themselves are transformers'.
"""

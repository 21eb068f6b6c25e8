"""What a block is: its key, its layout, its place in a chain and in the tree of prefixes.

Tiers and policies, which move blocks, have their own folders.
"""

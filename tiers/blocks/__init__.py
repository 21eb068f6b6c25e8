"""What a block is: its key, its layout, its place in a chain and in the tree of prefixes.

No tier and no policy: those move blocks, and live beside this folder.
"""

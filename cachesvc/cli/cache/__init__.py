"""`cachesvc cache ...`: look into the disk tier and the running server's blocks, and change them.

The tiers themselves are in `tiers`.
"""

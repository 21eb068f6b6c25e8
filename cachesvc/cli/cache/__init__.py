"""`cachesvc cache ...`: show and change the disk tier and the running server's blocks.

The tiers themselves are in `tiers`.
"""

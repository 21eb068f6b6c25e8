"""The bytes on disk: a block's record, its coded payload, and the rows kept beside it.

Pure functions over bytes. Reader and writer are one folder up.
"""

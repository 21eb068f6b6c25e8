"""The tier beneath the disk, which several servers share: records in Redis or in S3, by URL.

Only this folder knows redis and obstore, and imports them when a URL asks for them.
"""

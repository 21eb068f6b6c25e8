"""The tier below the disk, which several servers share: records in Redis or S3, by URL.

Only this folder imports redis and obstore, and only when a URL needs them.
"""

"""SGLang's socket: the disk tier as a storage backend of its HiCache, in `storage`.

Only this folder knows SGLang, which imports it; nothing else here does.
"""

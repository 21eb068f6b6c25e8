"""The public routes, one file a resource.

Admin routes live in `api.admin`; bodies and answers are shaped in `api.shapes`.
"""

"""The admin JSON routes under `/admin/api`.

Pages are in `api.admin.pages`; both call the same functions.
"""

"""The pages and routes of the people who run the server, under `/admin`.

`router.admin_router(parts)` joins them; `parts` lists what the running server
gives the routes; `access` says who may do what. Everything here runs on the event loop.
"""

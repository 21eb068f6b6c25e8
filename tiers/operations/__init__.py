"""What operators and age do to blocks: pins, limits, purges and idle expiry.

The routes and commands that call these live in `api` and `cachesvc`.
"""

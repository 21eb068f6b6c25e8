"""An administrator's operations on accounts, money, prices and the ledger: one function each.

Plain values in, JSON documents out. The command line, the JSON routes and the dashboard call these
and do the parsing and rendering.
"""

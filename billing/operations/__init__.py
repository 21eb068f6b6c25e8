"""What an administrator can do with accounts, money, prices and the ledger: one function each.

Plain values in, JSON documents out. The command line, the JSON routes and the dashboard call these;
how a call arrives and how its answer looks is theirs.
"""

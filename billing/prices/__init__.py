"""Rate cards, the price book, and rating: usage in, amount out.

Pure, except for reading card files. No balance and no database.
"""

"""Operators in C++ that a recorded forward calls in place of several of torch's, bit for bit.

`operators.cpp` has them, `library` compiles, keeps and loads them.
"""

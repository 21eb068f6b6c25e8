"""Operators that a recorded forward calls in place of several of torch's, bit for bit.

They are for a CPU, in C++: `operators.cpp` has them, `library` compiles, keeps and loads them.
"""

"""Operators that a recorded forward calls in place of several of torch's, bit for bit.

On a CPU in C++: `operators.cpp` has them, `library` compiles, keeps and loads them. On CUDA by
Triton's `kernels`, which `agreement` compares with torch's calls.
"""

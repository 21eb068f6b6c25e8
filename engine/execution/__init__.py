"""One step on the device: the forward pass, sampling, and CUDA graphs.

What goes into a step is decided in `engine.scheduling`.
"""

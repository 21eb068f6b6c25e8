"""Runs one step on the device: the forward pass, sampling, and CUDA graphs.

`engine.scheduling` decides what goes into a step.
"""

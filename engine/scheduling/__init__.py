"""Decides which request runs next: the queue, the sequences, and the scheduler that fills steps.

Nothing here touches a tensor. `engine.execution` runs what is scheduled.
"""

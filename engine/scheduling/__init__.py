"""Which request runs next: the queue, the sequences and the scheduler that fills each step.

Nothing here touches a tensor; `engine.execution` runs what is scheduled.
"""

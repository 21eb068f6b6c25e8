"""What several tests share: fakes of the parts, small seeded models, faulty storage, seeded loads.

Stand-ins behave as the real part where a test can see it. Nothing here is shipped.
"""

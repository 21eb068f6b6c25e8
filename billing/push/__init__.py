"""Sends ledger entries to a metering service: CloudEvents (OpenMeter), Stripe meters, Lago.

A format defines an entry's events and the meaning of answers. `delivery` sends them and keeps
refused ones; `reconcile` compares with the service's data. HTTP client only.
"""

"""Entries of the ledger at a metering service: CloudEvents (OpenMeter), Stripe meters, Lago.

Each format says how an entry is told and what an answer means; `delivery` sends and keeps what was
refused; `reconcile` compares with what the service has. Knows no HTTP server, only a client.
"""

"""Servers under load: random requests, sessions of many turns, batches, replicas and a router."""

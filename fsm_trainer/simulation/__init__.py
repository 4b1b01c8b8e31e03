"""Deterministic simulation: the real driver and reconciler over simulated workers."""

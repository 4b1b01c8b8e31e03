"""Samples, trajectories, data sources and rewards: token in, token out. Imports no torch at top."""

"""Rollout engines: one contract (`contract`), and the engines that keep it."""

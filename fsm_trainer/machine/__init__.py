"""The machine core: tables, guards, the pure step, the planner. Imports no torch, ray, asyncio."""

"""The command line: run, look at, explain and replay machines and runs."""

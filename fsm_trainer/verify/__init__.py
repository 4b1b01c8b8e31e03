"""Is it right: journals against the tables."""

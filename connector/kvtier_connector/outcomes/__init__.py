"""Why each request hit or missed: with which pin it begins, what became of it, and the report to the daemon."""

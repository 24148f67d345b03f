"""The tables of a report, and its summary, from the records alone."""

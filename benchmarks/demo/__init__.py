"""`make demo`: the story of two system prompts, one pinned by hand and one found, as a table and a chart."""

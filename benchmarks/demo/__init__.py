"""`make demo`: the story of one pinned system prompt, as a table and a chart."""

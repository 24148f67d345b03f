"""What the CLI prints: streams, tables, progress bars, durations, and the numbers of a prompt."""

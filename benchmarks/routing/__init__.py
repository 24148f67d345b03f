"""Which requests meet their prompt in a cache, by what their router knows."""

"""Hit rates of eviction policies on traces, beside the best in hindsight."""

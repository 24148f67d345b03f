"""`make bench`: kvtier beside the peers in every situation, from raw samples to tables and charts."""

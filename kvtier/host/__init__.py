"""The host tier: shared memory that holds chunks for the engines of this machine, and its only owner."""

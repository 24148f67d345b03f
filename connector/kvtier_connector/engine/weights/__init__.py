"""The weights of the model: which they are, and when they may change."""

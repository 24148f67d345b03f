"""The scheduler half: what is looked up, leased, loaded and stored, decided without waiting."""

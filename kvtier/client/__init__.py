"""Clients of the daemon: one for engines (session and arena), one for administration. Import the modules directly."""

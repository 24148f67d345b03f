"""The daemon process: command line, folders and their locks, signals, and the offline check."""

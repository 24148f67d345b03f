"""The daemon process: command line (`main`), folders, lock and signals (`lifecycle`). Everything else is below."""

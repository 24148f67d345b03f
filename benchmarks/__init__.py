"""Commands that measure kvtier: each module, and each package with a `__main__`, is one; README.md lists them."""

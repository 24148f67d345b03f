"""Small changes to the product, and whether the fast tests notice each: `make mutants`."""

"""Commands for who runs the cache: is it right, is it ready, what happens, stop it."""

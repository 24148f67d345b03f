"""How work runs beside the event loop and on it: owned tasks, thread pools, turns of the loop, the change lock."""

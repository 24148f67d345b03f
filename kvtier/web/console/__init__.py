"""The console's files over HTTP. They are in `kvtier/web/static`, and hold no data of the daemon."""

"""One benchmark of everything, beside the peers, from raw samples to tables and pictures. Run it with `make bench`."""

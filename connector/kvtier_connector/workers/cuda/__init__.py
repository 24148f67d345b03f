"""What copies to and from a CUDA device."""

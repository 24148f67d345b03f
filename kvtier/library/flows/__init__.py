"""What takes several calls of daemon and vLLM: to pin and capture, to warm, to go back to a version, bundle files."""

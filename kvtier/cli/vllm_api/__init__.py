"""How the CLI talks to the API server of vLLM over HTTP."""

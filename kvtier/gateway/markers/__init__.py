"""Cache markers in request bodies: found, checked as the hosted APIs check them, and turned into prompts to render.

Plain code without I/O. `marked_request` is the contract, `api_paths` chooses the reader of an endpoint.
"""

"""HTTP as the fuzzer sends it: exchanges of raw bytes, and requests that are made from the description of the API."""

"""What tests and benchmarks share: real processes under our control, small models, tokenizer and prompts."""

"""What benchmarks share: requests to vLLM, clocks and counters of processes, samples, statistics, tables and charts."""

"""Other ways to place experts, and routing from known processes to compare them on: for benchmarks, not installed."""

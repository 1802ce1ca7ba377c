"""What to keep: policies and their names. Plain Python, no vLLM import."""

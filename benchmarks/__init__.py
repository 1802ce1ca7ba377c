"""Benchmarks of KV policies against stock vLLM."""

"""Generated tasks of `vllm-kvx evaluate` as tasks of lm-eval."""

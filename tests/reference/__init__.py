"""Independent dense references: plain transformers models and masks, no code from vllm_kvx."""

"""vllm-kvx: KV policies for long prompts inside stock vLLM."""

__version__ = "0.1.0"

"""Stock vLLM and policies in one engine: first token, decode, KV pool, host time; and ideals."""

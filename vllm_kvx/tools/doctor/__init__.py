"""`vllm-kvx doctor`: what of an installation works, and whether a server would start with flags."""

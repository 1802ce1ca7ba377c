"""Names that vLLM has for the KV connectors that policies treat in a way of their own."""

NIXL = "NixlConnector"
LMCACHE = "LMCacheMPConnector"

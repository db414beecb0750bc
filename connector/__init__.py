"""The vLLM side: HyMCacheConnector (`hymcache.connector.vllm`) and what it is made of.

Nothing is imported here, so that vLLM's plugin loader, which runs in every one of its processes,
pays for `hymcache.connector.plugin` alone.
"""

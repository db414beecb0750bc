"""`hymcache bench region-reuse`: reuse of a prefix on the engine that computed it, and on another.

The experiment of arXiv 2609.10790, section 4, on whatever this machine's engines run on. Raw
requests go to `requests.jsonl`; `stats.json` is computed from them, and tables and figures from
that alone.
"""

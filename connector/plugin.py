"""Tells vLLM of the connector; the entry point `vllm.general_plugins` names `register`.

With it `kv_connector: HyMCacheConnector` needs no module path, and MultiConnector can have it as
one of its own.
"""

from __future__ import annotations

import contextlib
from typing import Final

CONNECTOR_NAME: Final = "HyMCacheConnector"
CONNECTOR_MODULE: Final = "hymcache.connector.vllm"


def register() -> None:
    """Registers the connector; vLLM calls it in each of its processes, some of them twice."""
    # Only here: the plugin is loaded wherever vLLM is, whether or not it transfers KV.
    from vllm.distributed.kv_transfer.kv_connector.factory import (
        KVConnectorFactory,
    )

    # ValueError: it is registered already.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)

"""The metadata service: which node holds which object, and which nodes there are.

The index and its protocol are C++ on one event loop (master_server.h); `MasterService` makes one
from the configuration and gives it administration by gRPC and an HTTP side. All of it is soft
state: the nodes publish anew to a master that comes back.
"""

from __future__ import annotations

from hymcache.master.admin_client import AdminClient
from hymcache.master.admin_token import admin_token
from hymcache.master.service import MasterService

__all__ = ["AdminClient", "MasterService", "admin_token"]

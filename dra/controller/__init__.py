"""The controller: offers blades to the scheduler, composes for claims, frees what claims gave up.

What it does in the cluster, as RBAC has to allow it:

    resourceclaims                  get list watch patch, in all namespaces
    resourceclaims/status           patch
    resourceclaims/driver           arbitrary-node:patch, arbitrary-node:update (1.36)
    resourceslices                  get list watch create update delete
    pods                            get list watch
    events.k8s.io events            create
    namespaces "kube-system"        get
    configmaps, leases              get list create update delete, in its own namespace
"""

from __future__ import annotations

from hymcache.dra.controller.controller import Controller
from hymcache.dra.controller.settings import ControllerSettings, LeaseTimes
from hymcache.dra.controller.steps import Step, StepHook

__all__ = ["Controller", "ControllerSettings", "LeaseTimes", "Step", "StepHook"]

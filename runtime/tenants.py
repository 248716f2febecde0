"""Caps by tenant: what a request of one may ask for at most (TAS)."""

from __future__ import annotations

from dataclasses import replace

from dsc.bundle_schema.dflash_config import DflashConfig, TenantCap
from dsc.runtime.request import Request


def tenant_cap(config: DflashConfig, tenant: str) -> TenantCap:
    """The cap of a tenant, the default one when it has none of its own."""
    return config.tenants.caps.get(tenant, config.tenants.default)


def cap_request(request: Request, cap: TenantCap) -> Request:
    """The request within its tenant's caps: fewer new tokens, smaller windows; it is never refused for them."""
    options = request.speculation
    if options is not None:
        window = None if options.window is None else min(options.window, cap.max_window)
        widest = cap.max_window if options.max_window is None else min(options.max_window, cap.max_window)
        options = options.model_copy(update={"window": window, "max_window": widest})
    return replace(request, speculation=options, max_tokens=min(request.max_tokens, len(request.ids) + cap.max_tokens))

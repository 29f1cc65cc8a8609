"""Configuration of what edges do with requests: tenants, and how replicas are chosen. Knows no engine and no Ray."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from manta.cluster.routing.admission import Tenant
from manta.engine.config import Section
from manta.replicas.edge.client import DEFAULT_TENANT, TenantKey


class TenantConfig(Section):
    """Whoever holds one API key, and the share of the service that belongs to him."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="in metrics and explanations; `default` means everybody without a tenant's key",
    )
    key: str | None = Field(default=None, repr=False, description="his bearer token; none for `default`")
    weight: float = Field(default=1.0, gt=0, description="of his share when requests of several tenants wait")
    tokens_per_s: float | None = Field(
        default=None, gt=0, description="of prompts and answers, over all edges together; more gets 429"
    )
    burst_tokens: float | None = Field(
        default=None, gt=0, description="what he may use at once after a pause; default: ten seconds' worth"
    )
    priority: int = Field(default=0, ge=-(2**20), le=2**20, description="lower runs first; none of his is more urgent")
    deadline_s: float | None = Field(default=None, gt=0, description="as serving.deadline_s, for his requests")


class RoutingConfig(Section):
    """How edges choose replicas."""

    prefix: bool = Field(
        default=True, description="by cached prefixes too; false: by load alone, and nobody is told what is cached"
    )
    detour_from_tokens: int | None = Field(
        default=None,
        ge=1,
        description="with pools: prompts of so many tokens or more go over a prefill replica; default: those for "
        "which that is estimated to cost less",
    )
    max_index_blocks: int = Field(
        default=2_000_000,
        ge=1024,
        description="cached blocks that an edge knows of, over all replicas; then the oldest go",
    )


def tenant_of(config: TenantConfig) -> Tenant:
    """As the edge's admission knows it."""
    return Tenant(
        name=config.name,
        weight=config.weight,
        tokens_per_s=config.tokens_per_s,
        burst_tokens=config.burst_tokens,
        priority=config.priority,
        deadline_s=config.deadline_s,
    )


def tenant_keys(tenants: Sequence[TenantConfig]) -> tuple[TenantKey, ...]:
    """Whose keys are accepted."""
    return tuple(TenantKey(one.key, tenant_of(one)) for one in tenants if one.key is not None)


def default_tenant(tenants: Sequence[TenantConfig]) -> Tenant:
    """Everybody without a tenant's key."""
    named = (tenant_of(one) for one in tenants if one.name == DEFAULT_TENANT)
    return next(named, Tenant(name=DEFAULT_TENANT))


def check_tenants(tenants: Sequence[TenantConfig]) -> None:
    """Raise ValueError unless they can be told apart, by names and by keys."""
    for tenant in tenants:
        if (tenant.key is None) != (tenant.name == DEFAULT_TENANT):
            what = "has no key" if tenant.name == DEFAULT_TENANT else "needs a key"
            raise ValueError(f"tenant {tenant.name!r} {what}")
        if tenant.key is not None and not tenant.key.strip():
            raise ValueError(f"the key of tenant {tenant.name!r} must not be empty")
    for what, given in (("names", [one.name for one in tenants]), ("keys", [one.key for one in tenants if one.key])):
        if len(set(given)) < len(given):
            raise ValueError(f"two tenants must not have equal {what}")

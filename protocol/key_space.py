"""Every Redis key name. All keys of one model carry one hash tag, so that a cluster keeps them in one slot."""

from dataclasses import dataclass

from protocol.ids import GatewayId, ModelName, TenantId, WorkerId

JOB_FIELD = b"job"  # the one field of an entry on a job stream: the signed envelope
REPLIES_FIELD = b"r"  # the one field of an entry on a reply stream: encoded replies
CANCEL_FIELD = b"c"  # the one field of an entry on a cancel stream: the request id
WORKER_GROUP = "workers"  # the consumer group of every job stream; consumers are worker ids


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Key names under one prefix; tests use a prefix each."""

    prefix: str = "sg"

    def jobs(self, model: ModelName) -> str:
        """Stream of signed jobs. An entry lives until its request has ended: it is acknowledged and deleted together."""
        return f"{self.prefix}:{{{model}}}:jobs"

    def cancels(self, model: ModelName) -> str:
        """Stream of request ids that workers must drop; trimmed by age, gone when unused."""
        return f"{self.prefix}:{{{model}}}:cancels"

    def workers(self, model: ModelName) -> str:
        """Sorted set of worker ids; the score is the Redis time (ms) until which a worker counts as alive."""
        return f"{self.prefix}:{{{model}}}:workers"

    def worker(self, model: ModelName, worker_id: WorkerId) -> str:
        """A worker's encoded WorkerStatus, with a TTL."""
        return f"{self.prefix}:{{{model}}}:worker:{worker_id}"

    def card(self, model: ModelName, digest: str) -> str:
        """An encoded ModelCard under the hex sha256 of its encoding, with a TTL that workers renew."""
        return f"{self.prefix}:{{{model}}}:card:{digest}"

    def replies(self, gateway_id: GatewayId) -> str:
        """Stream of replies to one gateway process. Workers never create it: if it is absent, that gateway is gone."""
        return f"{self.prefix}:replies:{gateway_id}"

    @property
    def models(self) -> str:
        """Sorted set of model names; the score is the Redis time (ms) until which some worker said it serves the model."""
        return f"{self.prefix}:models"

    # -- tenants and all that an operator sets: one slot, so that a change, its revision and its audit entry are one step

    @property
    def tenants(self) -> str:
        """Hash: tenant id -> sealed Tenant."""
        return f"{self.prefix}:{{tenancy}}:tenants"

    @property
    def api_keys(self) -> str:
        """Hash: key digest -> sealed ApiKey."""
        return f"{self.prefix}:{{tenancy}}:api_keys"

    @property
    def revoked_keys(self) -> str:
        """Set of the digests of revoked keys, so that a seed file doesn't bring them back."""
        return f"{self.prefix}:{{tenancy}}:revoked"

    @property
    def last_used(self) -> str:
        """Hash: key id -> Redis time (ms) of about its last use."""
        return f"{self.prefix}:{{tenancy}}:last_used"

    @property
    def revision(self) -> str:
        """Counter that every change of tenants, keys and prices raises; gateways watch it."""
        return f"{self.prefix}:{{tenancy}}:revision"

    @property
    def prices(self) -> str:
        """Hash: model name -> sealed Price."""
        return f"{self.prefix}:{{tenancy}}:prices"

    @property
    def shares(self) -> str:
        """Hash: name -> sealed ShareGroup."""
        return f"{self.prefix}:{{tenancy}}:shares"

    @property
    def audit(self) -> str:
        """Stream of audit entries (protocol.audit)."""
        return f"{self.prefix}:{{tenancy}}:audit"

    @property
    def metered(self) -> str:
        """Sorted set of tenants that may have open requests; the score is the Redis time (ms) until which that's looked into."""
        return f"{self.prefix}:metered"

    # -- one tenant's accounts: one slot each. The colon keeps the tag apart from every model's.

    def account(self, tenant: TenantId, part: str) -> str:
        """A key of a tenant's accounts (gateway.limits, gateway.usage_store)."""
        return f"{self.prefix}:{{tenant:{tenant}}}:{part}"

    def open_requests(self, tenant: TenantId) -> str:
        """Hash: request -> what was reserved for it, until it's settled."""
        return self.account(tenant, "open")

    def leases(self, tenant: TenantId) -> str:
        """Sorted set of open requests; the score is the Redis time (ms) until which its gateway has it."""
        return self.account(tenant, "leases")

    def progress(self, tenant: TenantId) -> str:
        """Hash: request -> what its gateway last reported of it."""
        return self.account(tenant, "progress")

    def deleted(self, tenant: TenantId) -> str:
        """Is there for a while after the tenant was deleted: nothing is admitted any more, so that nothing is written again."""
        return self.account(tenant, "deleted")

    def usage(self, tenant: TenantId) -> str:
        """Hash: a tenant's totals (requests, prompt_tokens, cached_tokens, completion_tokens)."""
        return self.account(tenant, "usage")

    def usage_rows(self, tenant: TenantId) -> str:
        """Stream of usage rows (protocol.usage)."""
        return self.account(tenant, "rows")

    def usage_hours(self, tenant: TenantId, day: str) -> str:
        """Hash: sums of the hours of a day."""
        return self.account(tenant, f"hours:{day}")

    def usage_days(self, tenant: TenantId, month: str) -> str:
        """Hash: sums of the days of a month."""
        return self.account(tenant, f"days:{month}")

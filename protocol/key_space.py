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

    def fault_orders(self, model: ModelName) -> str:
        """List of orders to damage pages, for workers that allow it; with a TTL."""
        return f"{self.prefix}:{{{model}}}:fault_orders"

    def fault_report(self, model: ModelName, order_id: str) -> str:
        """What became of an order, with a TTL."""
        return f"{self.prefix}:{{{model}}}:fault:{order_id}"

    def replies(self, gateway_id: GatewayId) -> str:
        """Stream of replies to one gateway process. Workers never create it: if it is absent, that gateway is gone."""
        return f"{self.prefix}:replies:{gateway_id}"

    @property
    def models(self) -> str:
        """Sorted set of model names; the score is the Redis time (ms) until which some worker said it serves the model."""
        return f"{self.prefix}:models"

    @property
    def tenants(self) -> str:
        """Hash: tenant id -> encoded Tenant."""
        return f"{self.prefix}:tenants"

    @property
    def api_keys(self) -> str:
        """Hash: key digest -> encoded ApiKey."""
        return f"{self.prefix}:api_keys"

    def usage(self, tenant: TenantId) -> str:
        """Hash: a tenant's totals (requests, prompt_tokens, cached_tokens, completion_tokens)."""
        return f"{self.prefix}:usage:{tenant}"

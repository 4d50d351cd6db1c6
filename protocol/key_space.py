"""Every Redis key name. All keys of one model carry one hash tag, so that a cluster keeps them in one slot."""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal

from protocol.ids import GatewayId, ModelName, TenantId, WorkerId

FORGET_FIELD = b"f"  # a field of an entry on a cancel stream: a tenant that was deleted
CANCEL_FIELD = b"c"  # the one field of an entry on a cancel stream: the request id
WORKER_GROUP = "workers"  # the consumer group of every line; consumers are worker ids
RETURNED = "-"  # the consumer that holds the entries of jobs that were taken from a worker and wait for another

PriorityClass = Literal["interactive", "batch"]


def line_name(priority: PriorityClass, tenant: TenantId) -> str:
    """The name of a tenant's line in a class. Neither part can hold a slash."""
    return f"{priority}/{tenant}"


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """The keys of one model's queue that have a fixed name, in the order in which scripts take them.

    live      hash: request id -> `state|owner|attempt|charge|line|entry|gateway`, from submission to the end
    leases    sorted set: request id of each job that a worker holds -> the Redis time (ms) until which it's believed to be at it
    returned  list: request ids of jobs that were taken from a worker, the first to be served
    resumes   hash: request id -> the signed envelope that continues the job, in place of the one in its line
    fair      hash: `v:TENANT` virtual time, `w:TENANT` weight, `floor`, `pulls`
    ready_*   sorted sets: tenants with waiting jobs of a class -> their virtual time
    load      hash: `n`, `t` waiting jobs and expected tokens of the model, `n:TENANT`, `t:TENANT` of a tenant, `l:LINE` jobs of a line
    pace      hash: how long answers are and how fast work gets done; has a time to live
    lines     set: names of the lines that exist
    doorbell  list: one item for each idle worker that should look
    waiting   sorted set, all scores 0: `LINE ENTRY ID WORKER` of each waiting job, in the order of the lines; the worker that should have it, if any
    room      sorted set: workers that can take a job -> until when that's believed, in Redis time (ms) x 1000, plus the jobs that they're at
    """

    live: str
    leases: str
    returned: str
    resumes: str
    fair: str
    ready_interactive: str
    ready_batch: str
    load: str
    pace: str
    lines: str
    doorbell: str
    waiting: str
    room: str

    def all(self) -> list[str]:
        """In the order that scripts expect."""
        return [getattr(self, field.name) for field in fields(self)]


@lru_cache(256)
def _queue_keys(prefix: str, model: ModelName) -> QueueKeys:
    return QueueKeys(*(f"{prefix}:{{{model}}}:{field.name}" for field in fields(QueueKeys)))


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Key names under one prefix; tests use a prefix each."""

    prefix: str = "sg"

    def line(self, model: ModelName, line: str) -> str:
        """Stream of a line's signed jobs. An entry lives until its request has ended; the last one takes the stream along."""
        return f"{self.prefix}:{{{model}}}:line:{line}"

    def queue(self, model: ModelName) -> QueueKeys:
        """The fixed keys of a model's queue."""
        return _queue_keys(self.prefix, model)

    def dead(self, model: ModelName) -> str:
        """Stream of jobs that were given up: the envelope and why. Bounded, and with a time to live."""
        return f"{self.prefix}:{{{model}}}:dead"

    def cancels(self, model: ModelName) -> str:
        """Stream of request ids that workers must drop; trimmed by age, gone when unused."""
        return f"{self.prefix}:{{{model}}}:cancels"

    def workers(self, model: ModelName) -> str:
        """Sorted set of worker ids; the score is the Redis time (ms) until which a worker counts as alive."""
        return f"{self.prefix}:{{{model}}}:workers"

    def worker(self, model: ModelName, worker_id: WorkerId) -> str:
        """A worker's encoded WorkerStatus, with a TTL."""
        return f"{self.prefix}:{{{model}}}:worker:{worker_id}"

    def held(self, model: ModelName, worker_id: WorkerId) -> str:
        """Set of digests of prefixes and sessions that a worker holds (protocol.routing), with a TTL."""
        return f"{self.prefix}:{{{model}}}:held:{worker_id}"

    def bell(self, model: ModelName, worker_id: WorkerId) -> str:
        """List with one item for each job that a worker should look for; with a TTL."""
        return f"{self.prefix}:{{{model}}}:bell:{worker_id}"

    def card(self, model: ModelName, digest: str) -> str:
        """An encoded ModelCard under the hex sha256 of its encoding, with a TTL that workers renew."""
        return f"{self.prefix}:{{{model}}}:card:{digest}"

    def fault_orders(self, model: ModelName) -> str:
        """List of orders to damage pages, for workers that allow it; with a TTL."""
        return f"{self.prefix}:{{{model}}}:fault_orders"

    def fault_report(self, model: ModelName, order_id: str) -> str:
        """What became of an order, with a TTL."""
        return f"{self.prefix}:{{{model}}}:fault:{order_id}"

    def replies(self, model: ModelName, gateway_id: GatewayId) -> str:
        """Stream of a model's replies to one gateway process; a field for each request. Workers never create it: if it is absent, that
        gateway is gone. It carries the model's hash tag, so that a reply and the check of who may write it are one step.
        """
        return f"{self.prefix}:{{{model}}}:replies:{gateway_id}"

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

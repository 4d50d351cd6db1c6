"""Orders to damage KV pages on purpose, for workers that were started to obey them, and what became of them."""

from dataclasses import dataclass

from protocol.ids import TenantId, WorkerId

ORDER_TTL_S = 60

# In the order in which `sluicegate fault list` shows them: what each one does.
FAULT_KINDS = {
    "flip-k": "a bit of a stored key changes",
    "flip-v": "a bit of a stored value changes",
    "flip-scale": "a bit of a layer's key scale changes",
    "flip-seal": "a bit of a seal changes",
    "flip-lease": "a bit of a page's lease tag changes",
    "swap-pages": "two pages of one request change places, seals and all",
    "foreign-page": "another tenant's page and its seal are copied over the request's",
    "replayed-page": "the page is as it was in an earlier life: right bytes, old seal",
    "wrong-position": "a page of the same request, from another position, seal and all",
    "wrong-model": "a page of the same tokens, sealed under another model's digest",
    "wrong-kv-format": "a page of the same tokens, sealed under another KV format",
    "table-off-by-one": "an entry of the page table leads to the next page",
    "freed-page": "the page is freed while the request still reads it",
    "missing-row": "a token's keys and values were never written",
    "write-after-free": "somebody who held the page before writes into it",
}


@dataclass(frozen=True, slots=True)
class FaultOrder:
    """Strike page `place` of a running request, of a tenant if one is named. `layer` -1 stands for one in the middle."""

    order_id: str
    kind: str
    tenant: TenantId | None = None
    layer: int = -1
    place: int = 0


@dataclass(frozen=True, slots=True)
class FaultReport:
    """What was struck, or why nothing was."""

    worker_id: WorkerId
    problem: str = ""
    request_id: str = ""
    tenant: str = ""
    page: int = -1
    layer: int = -1

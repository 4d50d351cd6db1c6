"""Namespaces: the unit within which a prefix may be shared, and the keyed digests that name a prefix in it.

Two requests share pages only if every field below is equal, since each namespace has a key of its own and a page's name
is a digest under that key. The encoding of the fields is injective: each is typed and length-prefixed.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.ids import TenantId
from protocol.signing import derive_key

CHAIN_DIGEST_BYTES = 16
_MAX_CACHED = 4096


@dataclass(frozen=True, slots=True)
class NamespaceFields:
    """Everything that a page's content depends on besides the tokens before and in it, and whom it belongs to."""

    tenant: TenantId
    model_digest: str
    kv_format: str
    salt: str | None = None
    share_group: str | None = None
    adapter: str | None = None
    tenant_since_ms: int = 0

    def encode(self) -> bytes:
        """An injective byte string: per field a type byte, then length and text, or nothing for an absent one."""
        parts = [self.tenant, self.model_digest, self.kv_format, self.salt, self.share_group, self.adapter]
        texts = b"".join(_encode_field(part) for part in parts)
        return texts + _encode_field(str(self.tenant_since_ms))


def _encode_field(text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    raw = text.encode("utf-8")
    return b"\x01" + len(raw).to_bytes(8, "little") + raw


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace's key and the functions made of it. Equal fields give equal keys, in every worker."""

    key: bytes = field(repr=False)
    owner: str = ""  # the tenant that it goes with; nobody's if a group shares it

    @property
    def root(self) -> bytes:
        """The digest of the empty prefix."""
        return hashlib.blake2b(b"root", key=self.key, digest_size=CHAIN_DIGEST_BYTES).digest()

    def chain(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The digest of a prefix that ends with a whole page of `tokens`, given that of the prefix before."""
        content = parent + struct.pack(f"<{len(tokens)}i", *tokens)
        return hashlib.blake2b(content, key=self.key, digest_size=CHAIN_DIGEST_BYTES).digest()

    def page_key(self, digest: bytes, tag: int, *, is_whole: bool) -> int:
        """What one life of a page is sealed with: by the digest of its own prefix if it is whole, of the one before while it fills.

        A signed number of 64 bits. The lease tag stands for the physical page and its generation.
        """
        content = (b"whole" if is_whole else b"filling") + digest + tag.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(content, key=self.key, digest_size=8).digest(), "little", signed=True)

    def lease_tag(self, page: int, generation: int) -> int:
        """The 64-bit tag of one life of a physical page in this namespace; never 0, which is the tag of no life."""
        content = b"lease" + page.to_bytes(8, "little") + generation.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(content, key=self.key, digest_size=8).digest(), "little") or 1


class NamespaceRing:
    """Derives namespaces from the installation's secret; keeps the ones in use so that a request costs no derivation."""

    def __init__(self, secret: bytes, model_digest: str, kv_format: str) -> None:
        self._secret = secret
        self.model_digest = model_digest
        self.kv_format = kv_format
        self._known: OrderedDict[bytes, Namespace] = OrderedDict()

    def namespace(
        self, tenant: TenantId, salt: str | None, share_group: str | None = None, tenant_since_ms: int = 0
    ) -> Namespace:
        """The namespace of an authenticated tenant, or of a share group that it was found to be in; narrowed by the client's salt, if any.

        A group's has no tenant in it, a tenant's no group: neither's pages can verify as the other's.
        """
        if share_group is None:
            fields = NamespaceFields(tenant, self.model_digest, self.kv_format, salt, tenant_since_ms=tenant_since_ms)
        else:
            fields = NamespaceFields(TenantId(""), self.model_digest, self.kv_format, salt, share_group)
        encoded = fields.encode()
        found = self._known.get(encoded)
        if found is None:
            found = self.derive(fields)
            self._known[encoded] = found
            if len(self._known) > _MAX_CACHED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(encoded)
        return found

    def derive(self, fields: NamespaceFields) -> Namespace:
        """The namespace of these fields, whoever asks."""
        return Namespace(derive_key(self._secret, "kv-namespace/" + fields.encode().hex()), fields.tenant)

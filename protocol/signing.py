"""Signed jobs: whoever can write to Redis still cannot become a tenant.

The envelope is `[version, body, signature]`, the signature an HMAC-SHA256 over the packed job with a key that is derived
from the installation's master secret.
"""

import hashlib
import hmac

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protocol.codec import decode, encode, pack, unpack_list
from protocol.errors import DecodeError, SignatureError
from protocol.job import Job

MIN_MASTER_SECRET_BYTES = 32
_VERSION = 1


def derive_key(master_secret: bytes, purpose: str) -> bytes:
    """A 32-byte key for one purpose, by HKDF-SHA256 (RFC 5869) from the master secret."""
    if len(master_secret) < MIN_MASTER_SECRET_BYTES:
        raise ValueError(f"the master secret must have at least {MIN_MASTER_SECRET_BYTES} bytes")
    info = b"sluicegate/v1/" + purpose.encode()
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=info).derive(master_secret)


def seal_job(key: bytes, job: Job) -> bytes:
    """The signed envelope of a job."""
    body = encode(job)
    return pack([_VERSION, body, hmac.digest(key, body, hashlib.sha256)])


def open_job(key: bytes, envelope: bytes) -> Job:
    """The job in an envelope; raises SignatureError or DecodeError. The body is not parsed before it has verified."""
    parts = unpack_list(envelope)
    if len(parts) != 3 or parts[0] != _VERSION or not all(isinstance(part, bytes) for part in parts[1:]):
        raise DecodeError("not a job envelope of this version")
    _, body, signature = parts
    if not hmac.compare_digest(hmac.digest(key, body, hashlib.sha256), signature):
        raise SignatureError("the job's signature does not verify")
    return decode(Job, body)

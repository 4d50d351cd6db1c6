"""A gateway's configuration, complete before anything starts."""

from dataclasses import dataclass, field

from protocol.ids import GatewayId, new_process_id


class SettingsError(Exception):
    """A setting that cannot work; names it."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Times are in seconds, sizes in bytes."""

    redis_url: str = field(repr=False)
    key_pepper: bytes = field(repr=False)
    job_signing_key: bytes = field(repr=False)
    admin_key: str | None = field(default=None, repr=False)
    host: str = "127.0.0.1"
    port: int = 8080
    key_prefix: str = "sg"
    gateway_id: GatewayId = field(default_factory=lambda: GatewayId(new_process_id("gateway")))
    max_body_bytes: int = 16 * 1024 * 1024
    max_buffered_bytes: int = 256 * 1024 * 1024
    body_timeout_s: float = 30.0
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    max_connections: int = 10_000
    intake_timeout_s: float = 10.0
    intake_wait_s: float = 10.0
    intake_processes: int = 2
    max_waiting_jobs: int = 1000
    max_waiting_tokens: int = 4_000_000
    max_tenant_jobs: int = 250
    max_tenant_tokens: int = 1_000_000
    max_choices: int = 16
    max_prompts: int = 64
    request_timeout_s: float = 600.0
    max_request_timeout_s: float = 3600.0
    keep_alive_s: float = 15.0
    slow_reader_s: float = 30.0
    drain_grace_s: float = 30.0
    key_cache_s: float = 0.5
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    lease_s: float = 15.0  # after which what a dead gateway's requests held is free again
    usage_rows_days: int = 35
    routing_key: bytes = field(default=b"", repr=False)  # without it jobs go to whichever worker asks first

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise SettingsError(f"{name} must be 0 to 65535, got {port}")
        if self.max_buffered_bytes < 2 * self.max_body_bytes:
            raise SettingsError(
                f"max_buffered_bytes must be twice max_body_bytes ({self.max_body_bytes}) at least, "
                f"got {self.max_buffered_bytes}"
            )
        if self.max_connections < 1:
            raise SettingsError(f"max_connections must be at least 1, got {self.max_connections}")
        if self.max_body_bytes < 1024:
            raise SettingsError(f"max_body_bytes must be at least 1024, got {self.max_body_bytes}")
        if not 1 <= self.lease_s <= 3600:
            raise SettingsError(f"lease_s must be 1 to 3600, got {self.lease_s}")
        if not 1 <= self.usage_rows_days <= 3660:
            raise SettingsError(f"usage_rows_days must be 1 to 3660, got {self.usage_rows_days}")
        if self.intake_processes < 1:
            raise SettingsError(f"intake_processes must be at least 1, got {self.intake_processes}")

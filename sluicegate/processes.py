"""`sluicegate gateway` and `sluicegate worker`: single processes, as a compose file or an orchestrator starts them."""

import asyncio
from argparse import Namespace

from sluicegate.environment import data_folder, redis_url
from sluicegate.errors import CommandError
from sluicegate.gateway_flags import limits
from sluicegate.logs import configure
from sluicegate.model_store import SYNTHETIC_MODEL, resolve
from sluicegate.secrets import admin_key, derived_keys
from sluicegate.tracing import tracing


def gateway(arguments: Namespace) -> None:
    """Serve HTTP until SIGTERM or SIGINT."""
    configure("gateway")
    from gateway.app import run
    from gateway.settings import GatewaySettings, SettingsError

    data = data_folder(arguments.data)
    keys = derived_keys(data)
    try:
        settings = GatewaySettings(
            redis_url=redis_url(arguments.redis_url, data),
            key_pepper=keys.key_pepper,
            job_signing_key=keys.job_signing,
            admin_key=admin_key(data),
            host=arguments.host,
            port=arguments.port,
            drain_grace_s=arguments.drain_grace,
            metrics_host=arguments.metrics_host,
            metrics_port=arguments.metrics_port,
            routing_key=keys.routing if arguments.routing == "on" else b"",
            **limits(arguments),
        )
        with tracing("gateway", arguments.trace_endpoint) as tracer:
            asyncio.run(run(settings, tracer))
    except SettingsError as error:
        raise CommandError(str(error)) from None


def worker(arguments: Namespace) -> None:
    """Serve a model's jobs until SIGTERM or SIGINT."""
    configure("worker")
    from kernels.errors import KernelError
    from protocol.errors import InvalidNameError
    from protocol.ids import parse_model_name
    from worker.errors import WorkerError
    from worker.model.errors import ModelError
    from worker.process import run
    from worker.settings import SyntheticSettings, WorkerSettings

    data = data_folder(arguments.data)
    is_synthetic = arguments.engine == "synthetic"
    name, path = (SYNTHETIC_MODEL, None) if is_synthetic else resolve(arguments.model, data)
    keys = derived_keys(data)
    try:
        synthetic = SyntheticSettings(arguments.prefill_rate, arguments.decode_rate, arguments.context)
        settings = WorkerSettings(
            redis_url=redis_url(arguments.redis_url, data),
            model_path=path,
            model_name=parse_model_name(arguments.name or name),
            job_signing_key=keys.job_signing,
            namespace_secret=keys.kv_namespaces,
            kernels=arguments.kernels,
            kv_dtype=arguments.kv_dtype,
            kv_scales=arguments.kv_scales,
            activations_bits=arguments.activations_bits,
            integrity=arguments.integrity,
            allow_fault_injection=arguments.allow_fault_injection,
            kv_tokens=arguments.kv_tokens,
            page_size=arguments.page_size,
            max_sequences=arguments.max_sequences,
            step_tokens=arguments.step_tokens,
            lease_s=arguments.lease,
            stall_s=arguments.stall,
            max_deliveries=arguments.max_deliveries,
            drain_grace_s=arguments.drain_grace,
            synthetic=synthetic if is_synthetic else None,
            routing_key=keys.routing,
        )
        with tracing("worker", arguments.trace_endpoint) as tracer:
            asyncio.run(run(settings, tracer))
    except (WorkerError, ModelError, KernelError, InvalidNameError) as error:
        raise CommandError(str(error)) from None

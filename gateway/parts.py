"""The running parts of a gateway, as its routes find them in the application."""

import asyncio
from dataclasses import dataclass

from aiohttp import web

from gateway.auth import Authenticator
from gateway.body import BodyMemory
from gateway.generation import Generations
from gateway.intake.pool import IntakePool
from gateway.metrics import Metrics
from gateway.model_directory import ModelDirectory
from gateway.redis_link import RedisLink
from gateway.reply_reader import ReplyReader
from gateway.settings import GatewaySettings
from gateway.tenancy_watch import TenancyWatch
from gateway.tracing import Tracing


@dataclass(slots=True)
class Parts:
    """Everything that a route may need."""

    settings: GatewaySettings
    link: RedisLink
    auth: Authenticator
    watch: TenancyWatch
    directory: ModelDirectory
    intake: IntakePool
    reader: ReplyReader
    generations: Generations
    metrics: Metrics
    bodies: BodyMemory
    tracing: Tracing
    tasks: list[asyncio.Task[None]]
    is_draining: bool = False
    num_answering: int = 0  # requests past authentication, whether their jobs are queued yet or not


PARTS = web.AppKey("parts", Parts)

"""`sluicegate plan`: reads the question, prints the answers."""

import json
from argparse import Namespace
from pathlib import Path

from sluicegate.errors import CommandError
from sluicegate.plan import picture, report
from sluicegate.plan.capacity import Plan
from sluicegate.plan.cards import find_card
from sluicegate.plan.precision import parse_policy
from sluicegate.plan.read_config import find_shape

USUAL_CONTEXT = 8192


def run(arguments: Namespace) -> None:
    """Print a plan; raises CommandError after that if it does not fit."""
    plan = make_plan(arguments)
    print(json.dumps(report.as_json(plan), indent=1) if arguments.json else report.text(plan))
    if arguments.picture:
        picture.draw(plan, Path(arguments.picture))
    if not plan.fits:
        raise CommandError(f"{plan.shape.name} does not fit")


def make_plan(arguments: Namespace) -> Plan:
    """The question that the arguments ask. Raises CommandError."""
    shape = find_shape(arguments.model)
    return Plan(
        shape=shape,
        policy=parse_policy(arguments.weights or shape.as_shipped, shape),
        kv_format=arguments.kv,
        card=find_card(arguments.gpu),
        count=arguments.count,
        tp=arguments.tp or arguments.count,
        context=arguments.context or min(USUAL_CONTEXT, shape.context),
        concurrency=arguments.concurrency,
        memory_fraction=arguments.memory_fraction,
        page_size=arguments.page_size,
        gpu_hour=arguments.gpu_hour,
        holds_mtp=arguments.mtp,
    )

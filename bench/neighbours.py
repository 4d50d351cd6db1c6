"""Who else computed during a run: its figures are worth less the more that was."""

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

_IDLE_FIELDS = (3, 4)  # idle, iowait
_NUM_FIELDS = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user and nice already


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of all cores: busy with anything, and busy for this process and the children that it has waited for."""

    at_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> "CpuTimes":
        """Read the kernel's counters."""
        fields = [int(field) for field in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]]
        ticks = sum(value for index, value in enumerate(fields[:_NUM_FIELDS]) if index not in _IDLE_FIELDS)
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        return cls(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own_s)

    def share_of_others(self, before: "CpuTimes", num_cores: int) -> float:
        """The part of all cores' time since then that other processes, or other machines on the same host, had."""
        others_s = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return max(0.0, others_s / ((self.at_s - before.at_s) * num_cores))

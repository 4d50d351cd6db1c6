"""CPU time of processes: on a shared machine the one number that neighbours can't change much."""

import os
from pathlib import Path


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

"""Facts about this machine: cores, memory and its limits, GPUs, disks, versions.

Nothing here imports torch at import time, and `gpus` asks the driver before it asks torch: the parent of a run only
needs a count, and importing torch for it would cost seconds and memory.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiers.limits import cgroup_folders, read_limits
from zerocli.errors import UserError

ROOT = Path("/")
AHEAD_NBYTES = 128 << 10
"""Bytes that a system reads ahead for one request, at least: of a longer one it may leave the rest."""


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch can use."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Memory:
    """Host memory in bytes; `limit` is the cgroup's (None: none), `available` respects it."""

    total: int
    available: int
    limit: int | None

    @property
    def allowed(self) -> int:
        """What processes may take of it."""
        return min(self.total, self.limit or self.total)


def allow_open_files(needed: int) -> None:
    """Have this process and its children may open `needed` files; raise UserError where its limit forbids that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"a process may have {hard} files open here, and this run needs up to {needed} a process",
            hint=f"ulimit -n {max(needed, 4096)} (or LimitNOFILE= of a service), and the same command",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def cores(root: Path = ROOT) -> int:
    """Return how many cores this process may use, by its affinity and its cgroup's quota; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    for folder in cgroup_folders("cpu", root):
        words = (_read(folder / "cpu.max") or "").split()
        if not words:
            words = [_read(folder / "cpu.cfs_quota_us") or "-1", _read(folder / "cpu.cfs_period_us") or "100000"]
        if words[0].isdigit():
            count = min(count, max(1, int(words[0]) // int(words[1])))
    return max(1, count)


def memory(root: Path = ROOT) -> Memory:
    """Return host memory; what is available is the lesser of the kernel's word and what the cgroup still allows."""
    fields: dict[str, str] = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(root / "proc/meminfo") or "", re.MULTILINE))
    if "MemTotal" in fields:
        total = int(fields["MemTotal"]) * 1024
        available = int(fields.get("MemAvailable", fields["MemTotal"])) * 1024
    else:
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = read_limits(root)
    return Memory(total, min(available, limits.available), limits.cgroup_limit)


def memlock() -> int | None:
    """Return how many bytes this process may pin, or None when there is no limit."""
    return read_limits().memlock


def disk(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return (total, free) bytes of the file system that holds `path`, which need not exist yet."""
    usage = shutil.disk_usage(_existing(path))
    return usage.total, usage.free


def file_system(path: str | os.PathLike[str]) -> int:
    """Return the number of the file system that holds `path`, which need not exist yet."""
    return _existing(path).stat().st_dev


def read_ahead(files: Sequence[Path]) -> threading.Thread | None:
    """Have the system read files into its cache from now on, while this process does other work.

    It does nothing if they would take more than half of the memory that is free.
    """
    if not hasattr(os, "posix_fadvise") or sum(path.stat().st_size for path in files) > memory().available / 2:
        return None
    reader = threading.Thread(target=_advise, args=(files,), name="read-ahead", daemon=True)
    reader.start()
    return reader


def _advise(files: Sequence[Path]) -> None:
    try:
        for path in files:
            with path.open("rb") as file:
                for start in range(0, path.stat().st_size, AHEAD_NBYTES):
                    os.posix_fadvise(file.fileno(), start, AHEAD_NBYTES, os.POSIX_FADV_WILLNEED)
    except OSError:
        pass  # who reads the file says what is wrong with it


def _existing(path: str | os.PathLike[str]) -> Path:
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that torch will see, without importing torch where the driver can tell."""
    return driver_gpus(environ) if torch_has_cuda() else []


def driver_gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that this process may use by the driver's word, whatever torch was built for."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1", "NoDevFiles"):
        return []
    listed = _nvidia_smi()
    if listed is None:
        return _gpus_of_torch() if torch_has_cuda() else []
    return listed if visible is None else _select(listed, visible)


def torch_has_cuda() -> bool:
    """Say whether the installed torch was built for GPUs; reads its version file and imports nothing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    text = _read(Path(spec.submodule_search_locations[0]) / "version.py") or ""
    return bool(re.search(r"^(cuda|hip)\b[^=\n]*=\s*['\"]", text, re.MULTILINE))


def version(package: str) -> str | None:
    """Return the installed version of `package`, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_compiler(on_gpu: bool, environ: Mapping[str, str] = os.environ) -> str:
    """Return what torch.compile needs and this machine does not have; an empty text if there is nothing.

    On a GPU it needs Triton, which itself calls a C compiler; on the CPU a C++ compiler.
    """
    path = environ.get("PATH")
    if on_gpu:
        if importlib.util.find_spec("triton") is None:
            return "there is no Triton"
        names = [environ["CC"]] if environ.get("CC") else ["gcc", "clang"]
        return "" if any(shutil.which(name, path=path) for name in names) else "there is no C compiler (gcc, or CC)"
    own = environ.get("CXX") or ("clang++" if platform.system() == "Darwin" else "g++")
    return "" if shutil.which(own, path=path) else "there is no C++ compiler (g++, or CXX)"


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of what is kept for later runs of this user."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerocli"


def processor(root: Path = ROOT) -> str:
    """Return the processor's name and instructions as one text, as far as the system tells."""
    text = _read(root / "proc/cpuinfo") or ""
    words = re.findall(r"^(?:model name|flags|CPU part|Features)\s*:.*", text, re.MULTILINE)
    return "\n".join(dict.fromkeys(words)) or platform.processor()


def started(pid: int) -> int | None:
    """Return when a process was started, in whole seconds since 1970, every time the same; None if that is unknown."""
    try:
        ticks = int((ROOT / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        booted = re.search(r"^btime (\d+)", (ROOT / "proc/stat").read_text(), re.MULTILINE)
        return int(booted[1]) + ticks // os.sysconf("SC_CLK_TCK") if booted else None
    except (OSError, ValueError, IndexError):
        return None


def backends() -> list[str]:
    """Return the names of torch's distributed backends on this machine (imports torch)."""
    import torch.distributed as dist

    if not dist.is_available():
        return []
    found = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available(), "mpi": dist.is_mpi_available()}
    return [name for name, present in found.items() if present]


def system() -> str:
    """Return the operating system and processor in one line."""
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _nvidia_smi() -> list[Gpu] | None:
    """Return the driver's list of GPUs; None when the driver cannot be asked this way."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = []
    for line in answer.stdout.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if name:
            found.append(Gpu(name.strip(), int(mebibytes) * 2**20 if mebibytes.strip().isdigit() else 0))
    return found


def _gpus_of_torch() -> list[Gpu]:
    if not any((ROOT / name).exists() for name in ("dev/nvidiactl", "dev/kfd", "dev/dxg")):
        return []
    import torch

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [Gpu(each.name, each.total_memory) for each in properties]


def _select(listed: list[Gpu], visible: str) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; CUDA stops reading at the first bad entry."""
    chosen = []
    for entry in visible.split(","):
        entry = entry.strip()
        if entry.isdigit() and int(entry) < len(listed):
            chosen.append(listed[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")) and listed:
            chosen.append(listed[0])
        else:
            break
    return chosen

"""What `baton up` leaves for other shells: where the cluster listens and which process owns it.

One JSON file per cluster name. A record whose process is gone (the pid is reused or dead) counts as absent.
It holds the cluster's secret, so that other shells of its user can connect: file and folder are for that user alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from baton.config import Secret
from baton.errors import ClusterError, ConfigError


class ClusterRecord(msgspec.Struct):
    """`pid` and `pid_started` (seconds since the epoch) together identify the owning process."""

    name: str
    address: str
    ray_address: str | None
    pid: int
    pid_started: float
    secret: Secret | None = None
    url: str | None = None
    """Where HTTP is served."""
    warnings: list[str] = []
    """What `baton up` has to say about it."""
    shutdown_grace_s: float = 0.0
    """`router.shutdown_grace_s`: so long its end may take while requests are open."""
    logs: str | None = None
    """The folder of what its workers log; None: its owner's own output."""


def records_folder() -> Path:
    """$BATON_RUNTIME, else $XDG_RUNTIME_DIR/baton, else a folder of the user's under the cache."""
    if own := os.environ.get("BATON_RUNTIME"):
        return Path(own)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "baton"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "clusters"


def log_file(name: str) -> Path:
    """Where a detached cluster's owner writes what it has to say."""
    return records_folder() / f"{name}.log"


def write_record(
    name: str,
    address: str,
    ray_address: str | None,
    *,
    secret: Secret | None = None,
    url: str | None = None,
    warnings: Sequence[str] = (),
    shutdown_grace_s: float = 0.0,
    logs: str | None = None,
) -> None:
    """Record that this process owns the cluster. Raises ClusterError if another living one has the name."""
    claim_name(name)
    process = psutil.Process()
    record = ClusterRecord(
        name,
        address,
        ray_address,
        process.pid,
        process.create_time(),
        secret,
        url,
        list(warnings),
        shutdown_grace_s,
        logs,
    )
    folder = records_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = folder / f".{name}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    # Created for its owner alone, before anything stands in it; the folder may be shared, if BATON_RUNTIME says so.
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(record, enc_hook=Secret.reveal))
    temporary.replace(_file(name))


def claim_name(name: str) -> None:
    """Raises ClusterError if a living cluster has this name."""
    other = _read(name)
    if other is not None and other.pid != os.getpid():
        raise ClusterError(
            f"a cluster named {name} is up already (process {other.pid}, {other.address}); "
            f"end it with `baton down {name}`, or give this one another `name`"
        )


def remove_record(name: str) -> None:
    """Forget the cluster if this process owns it."""
    record = _read(name)
    if record is not None and record.pid == os.getpid():
        _file(name).unlink(missing_ok=True)


def find_record(name: str | None = None) -> ClusterRecord:
    """The living cluster of that name; with None the only one there is. Raises ClusterError otherwise."""
    if name is not None:
        record = _read(name)
        if record is None:
            raise ClusterError(f"no cluster named {name} is up; start one with `baton up`")
        return record
    living = [r for r in (_read(f.stem) for f in sorted(records_folder().glob("*.json"))) if r is not None]
    if not living:
        raise ClusterError("no cluster is up; start one with `baton up`")
    if len(living) > 1:
        names = ", ".join(r.name for r in living)
        hint = "`--cluster NAME`, or `baton down NAME`"
        raise ClusterError(f"several clusters are up ({names}); name the one that you mean ({hint})")
    return living[0]


def end_owner(record: ClusterRecord, timeout_s: float) -> None:
    """Ask the owning process to end its cluster and wait for it; kill it and its children if it does not.

    `timeout_s`: beyond the grace that the cluster gives to open requests.
    Processes that the cluster did not start are never touched.
    """
    try:
        owner = psutil.Process(record.pid)
        children = owner.children(recursive=True)
        owner.send_signal(signal.SIGTERM)
        try:
            owner.wait(record.shutdown_grace_s + timeout_s)
        except psutil.TimeoutExpired:
            children = owner.children(recursive=True)
            owner.kill()
        _, alive = psutil.wait_procs([p for p in children if p.is_running()], timeout=5)
        for child in alive:
            child.kill()
    except psutil.NoSuchProcess:
        pass
    _file(record.name).unlink(missing_ok=True)


def _file(name: str) -> Path:
    return records_folder() / f"{name}.json"


def _read(name: str) -> ClusterRecord | None:
    """Raises ClusterError for a record whose secret others can read. That of a process that is gone is removed."""
    file = _file(name)
    try:
        record = msgspec.json.decode(file.read_bytes(), type=ClusterRecord, dec_hook=lambda kind, text: kind(text))
        mode = stat.S_IMODE(file.stat().st_mode)
    except (OSError, msgspec.DecodeError, ConfigError):
        return None
    if not _is_alive(record):
        with contextlib.suppress(OSError):
            file.unlink()
        return None
    if record.secret is not None and mode & 0o077:
        raise ClusterError(
            f"{file} holds the secret of cluster {name}, and others may read it (mode {mode:o}): `chmod 600` it, and "
            "change the secret if somebody may have done so"
        )
    return record


def _is_alive(record: ClusterRecord) -> bool:
    try:
        owner = psutil.Process(record.pid)
        return bool(owner.create_time() == record.pid_started and owner.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

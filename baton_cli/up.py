"""`baton up`: owns a cluster until it is told to end, in this process or in one that it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import yaml

from baton.config import ClusterConfig, dump_config
from baton.errors import ClusterError
from baton_cli.guard import guarded, interrupt
from baton_cli.output import err, out, spinner, status_table
from baton_cluster.launch import launch
from baton_cluster.logs import configure_logging
from baton_cluster.record import claim_name, find_record, log_file, remove_record, write_record


def run_up(config: ClusterConfig) -> None:
    """Start the cluster, show it, and wait for Ctrl-C or SIGTERM; then end it."""
    claim_name(config.name)
    with ExitStack() as stack:
        with spinner("starting") as show:
            configure_logging(config)
            cluster = stack.enter_context(launch(config, progress=lambda text: show(text)))
        show = out.print  # from now on: something was restarted
        details = cluster.details()
        write_record(
            config.name,
            cluster.address,
            details.get("ray_address"),
            secret=config.security.secret,
            url=cluster.url,
            warnings=cluster.warnings,
            shutdown_grace_s=config.router.shutdown_grace_s,
            logs=details.get("logs"),
        )
        try:
            out.print(status_table(cluster.status(), cluster.address))
            for warning in cluster.warnings:
                err.print(f"warning: {warning}", style="yellow")
            _show_logs(details.get("logs"))
            out.print(
                f"{config.name} is ready at {_places(cluster.address, cluster.url)}; Ctrl-C or `baton down` ends it"
            )
            while True:
                signal.pause()
        except KeyboardInterrupt:
            out.print(f"ending; open requests have {config.router.shutdown_grace_s:g} s, Ctrl-C again cuts that short")
        finally:
            remove_record(config.name)
    out.print(f"{config.name} has ended")


def run_detached(config: ClusterConfig) -> None:
    """Start a process of its own session that owns the cluster, and return once the cluster is ready.

    Raises ClusterError with what that process said, if it ends before; Ctrl-C until then ends it too.
    """
    claim_name(config.name)
    log = log_file(config.name)
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with log.open("wb") as file:
        owner = subprocess.Popen(
            [sys.executable, "-m", "baton_cli.up"],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    assert owner.stdin is not None
    with owner.stdin as pipe:
        pipe.write(yaml.safe_dump(dump_config(config, with_secret=True)).encode())
    try:
        with spinner(f"starting (log: {log})"):
            record = _wait_ready(config.name, owner)
    except BaseException:
        if owner.poll() is None:
            owner.terminate()
            owner.wait()
        raise
    from router.client import RouterClient

    with RouterClient(record.address, secret=record.secret) as client:
        out.print(status_table(client.status(), record.address))
    for warning in record.warnings:
        err.print(f"warning: {warning}", style="yellow")
    _show_logs(record.logs)
    where = _places(record.address, record.url)
    out.print(f"{config.name} is ready at {where}; `baton down {config.name}` ends it; log: {log}")


def _show_logs(folder: str | None) -> None:
    if folder is not None:
        out.print(f"workers log to {folder}/worker-*.err, where each runs", markup=False, soft_wrap=True)


def _places(address: str, url: str | None) -> str:
    return address if url is None else f"{address} and {url}/v1"


def _wait_ready(name: str, owner: subprocess.Popen[Any]) -> Any:
    while True:
        try:
            record = find_record(name)
        except ClusterError:
            record = None
        if record is not None and record.pid == owner.pid:
            return record
        if owner.poll() is not None:
            said = last_error(log_file(name).read_text(encoding="utf-8", errors="replace"))
            raise ClusterError(said or f"its process ended with {owner.returncode}; see {log_file(name)}")
        time.sleep(0.1)  # the record is a file, and there is no portable way to wait for one


def last_error(log: str) -> str:
    """The last error that a process wrote, which may have been broken into lines; else its last line."""
    lines = log.strip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if not starts:
        return lines[-1] if lines else ""
    return " ".join(line.strip() for line in lines[starts[-1] :]).removeprefix("error: ")


def _owner() -> None:
    """Entry point of the process that `run_detached` leaves behind; its configuration comes on stdin."""
    from baton.config import parse_config

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    config = parse_config(yaml.safe_load(sys.stdin.read()))
    guarded(lambda: run_up(config))


if __name__ == "__main__":
    _owner()

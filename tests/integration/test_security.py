"""Whole clusters with a secret: who has it is served, and nobody else gets in, on any socket."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from baton.config import parse_config
from baton.errors import BatonError, ClusterError
from baton.security import Guard, Security
from baton_cluster.specs import worker_specs
from router.async_client import AsyncRouterClient
from router.client import RouterClient
from tests.stub_cluster import StubCluster, expected_tokens, stub_worker

SECRET = "a secret of the tests"
OTHER = "another secret, as long"
PROMPT = list(range(40))
SPLIT: dict[str, Any] = {"prefill": {"kv_blocks": 64}, "decode": {"kv_blocks": 64}}


@pytest.fixture(scope="module")
def secured() -> Iterator[StubCluster]:
    with StubCluster(SPLIT, transport="zmq+tcp", security={"secret": SECRET}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def unsecured() -> Iterator[StubCluster]:
    with StubCluster(SPLIT) as cluster:
        yield cluster


def refusal(address: str, secret: str | None) -> str:
    """What a client is told, within the time of one connection attempt."""
    started = time.monotonic()
    with pytest.raises(ClusterError) as caught, RouterClient(address, secret=secret, connect_timeout=20):
        pass
    assert time.monotonic() - started < 10, "refused, not timed out"
    return str(caught.value)


def test_who_has_the_secret_is_served(secured: StubCluster) -> None:
    with RouterClient(secured.address, secret=SECRET) as client:
        done = client.generate(PROMPT, max_tokens=5, seed=0)
    assert list(done.token_ids) == expected_tokens(PROMPT, 5)
    assert done.prefill_worker != done.decode_worker and done.kv_bytes > 0, "handed over on encrypted links"
    secured.wait_ledger_zero()

    async def ask() -> list[int]:
        async with AsyncRouterClient(secured.address, secret=SECRET) as client:
            return list((await client.generate(PROMPT, max_tokens=5, seed=0)).token_ids)

    assert asyncio.run(ask()) == expected_tokens(PROMPT, 5)


def test_a_wrong_secret_is_named(secured: StubCluster) -> None:
    assert "refused the secret" in refusal(secured.address, OTHER)


def test_a_missing_secret_is_named(secured: StubCluster) -> None:
    assert "wants a secret" in refusal(secured.address, None)


def test_a_secret_too_many_is_named(unsecured: StubCluster) -> None:
    assert re.search("has no secret|another one, or none", refusal(unsecured.address, SECRET))


@pytest.mark.parametrize("secret", [OTHER, None])
def test_a_worker_without_the_secret_does_not_start(secured: StubCluster, secret: str | None) -> None:
    config = parse_config({"launcher": "local", "pools": SPLIT, "security": {"secret": secret}})
    context: zmq.Context[Any] = zmq.Context()
    worker, _, _ = stub_worker(
        config,
        worker_specs(config)[0],
        router_address=secured.back,
        context=context,
        transport="zmq+tcp",
        step_s=lambda plan: 0.0,
    )
    started = time.monotonic()
    with pytest.raises(ClusterError, match="refused the secret" if secret else "wants a secret"):
        worker.start(timeout_s=20)
    assert time.monotonic() - started < 10
    context.term()
    assert len(secured.router.status().workers) == 2


def endpoints(cluster: StubCluster) -> dict[str, str]:
    info = cluster.workers["decode-0"].info
    return {
        "router front": cluster.address,
        "router back": cluster.back,
        "control": info.control_address,
        "data": info.data_address.removeprefix("zmq+"),
    }


@pytest.mark.parametrize("name", ["router front", "router back", "control", "data"])
def test_every_socket_lets_only_holders_in(secured: StubCluster, name: str) -> None:
    def gets_in(secret: str | None) -> bool:
        context: zmq.Context[Any] = zmq.Context()
        socket = context.socket(zmq.PUSH if name == "data" else zmq.DEALER)
        Security(secret).secure_client(socket)
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | failed | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        try:
            socket.connect(endpoints(secured)[name])
            assert monitor.poll(10_000), "no handshake"
            event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
            return event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        finally:
            socket.disable_monitor()
            context.destroy(linger=0)

    assert gets_in(SECRET)
    assert not gets_in(OTHER)
    assert not gets_in(None)


def test_the_servers_key_alone_does_not_let_in(secured: StubCluster) -> None:
    """ZAP asks for the client's key too: a public key that leaks is no way in."""
    mine = Security(SECRET)
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = mine._server[0]
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    try:
        socket.connect(secured.address)
        assert monitor.poll(10_000)
        assert int.from_bytes(monitor.recv_multipart()[0][:2], "little") == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    finally:
        socket.disable_monitor()
        context.destroy(linger=0)


def test_a_context_has_one_handler_until_its_last_guard_goes() -> None:
    context: zmq.Context[Any] = zmq.Context()
    one, two = Security(SECRET).guard(context), Security(OTHER).guard(context)
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    Security(OTHER).secure_server(server)
    Security(OTHER).secure_client(client)
    one.close()
    one.close()
    client.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
    client.send(b"hello")
    assert server.poll(10_000) and server.recv_multipart()[1] == b"hello"
    server.close(linger=0)
    client.close(linger=0)
    two.close()
    context.term()


def test_no_secret_leaves_sockets_alone() -> None:
    context: zmq.Context[Any] = zmq.Context()
    with context.socket(zmq.ROUTER) as socket:
        Guard(context, None).close()
        Security(None).secure_server(socket)
        Security(None).secure_client(socket)
        assert socket.mechanism == zmq.NULL
    context.term()


def test_a_secret_that_is_too_short_is_refused() -> None:
    with pytest.raises(BatonError, match="too short"):
        RouterClient("tcp://127.0.0.1:1", secret="short")

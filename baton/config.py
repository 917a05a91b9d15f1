"""The configuration tree of a cluster, read from `cluster.yaml`.

One frozen typed tree. Every key has a default that works on one machine, so an empty file is a
valid configuration. Unknown keys, wrong types and impossible values raise ConfigError with the
YAML path, the value and what is allowed. Must not know Ray, torch or sockets.
"""

from __future__ import annotations

import difflib
import hmac
import ipaddress
import os
import re
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import yaml

from baton.errors import ConfigError

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
"""Finite and of a length that every timer can wait: 1e6 s are eleven days."""
Milliseconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Role = Literal["prefill", "decode", "both"]
PolicyName = Literal[
    "round_robin",
    "random",
    "power_of_two",
    "least_loaded",
    "least_outstanding_tokens",
    "kv_aware",
    "session",
    "slo_aware",
]
"""See `router.policies`."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=None):
    """Base of every section: immutable, keyword-only, unknown keys refused."""


MIN_SECRET = 16
"""Characters. A secret that can be guessed is none: who records a handshake can try guesses at leisure."""


class Secret:
    """A text that shows nowhere: not in `repr`, messages or dumps; `reveal` gives it."""

    __slots__ = ("_text",)
    path = "security.secret"
    """Where the configuration has it."""

    def __init__(self, text: str):
        """Raises ConfigError for what is no text of at least `MIN_SECRET` characters, without saying what it was."""
        if not isinstance(text, str):
            raise ConfigError(self.path, "must be a text; put it in quotes")
        if len(text) < MIN_SECRET:
            raise ConfigError(
                self.path,
                f"is too short: {len(text)} characters, at least {MIN_SECRET}; "
                "take `python -c 'import secrets; print(secrets.token_urlsafe(32))'`",
            )
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "<secret>"

    def __reduce__(self) -> tuple[type[Secret], tuple[str]]:
        return type(self), (self._text,)


class ApiKey(Secret):
    """One that HTTP clients send in a header."""

    __slots__ = ()
    path = "http.api_keys"

    def __init__(self, text: str):
        """Raises ConfigError, too, for what a header cannot carry."""
        super().__init__(text)
        if not all("!" <= c <= "~" for c in text):
            raise ConfigError(self.path, "has characters that no header carries; take letters, digits, - and _")


class RayConfig(_Section, frozen=True):
    """How to reach or start Ray."""

    address: str | None = None
    """None starts a Ray cluster of Baton's own; otherwise an existing one (`host:port` or `auto`)."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Placement-group strategy for the workers' bundles."""
    num_cpus: PositiveInt | None = None
    """Logical CPUs of a cluster started here; None: as many as the workers ask for, at least the machine's."""
    num_gpus: NonNegativeInt | None = None
    """Logical GPUs of a cluster started here; None: what Ray detects."""


class ModelConfig(_Section, frozen=True):
    """Which model every worker serves."""

    source: str = "demo"
    """`demo`, a local folder, a `.gguf` file, or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights and KV cache; `auto` is bfloat16 where the device computes it natively, else float32."""
    max_model_len: PositiveInt | None = None
    """Prompt plus output, in tokens; None: the model's own limit."""


class PoolConfig(_Section, frozen=True):
    """A group of equal workers."""

    role: Role | None = None
    """None: the pool's name, which then must be one of `prefill`, `decode`, `both`."""
    workers: NonNegativeInt = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda where `gpus` > 0 and torch sees a GPU, else cpu. Apart from `gpus`, which Ray schedules."""
    gpus: Annotated[float, msgspec.Meta(ge=0)] = 0
    """GPUs that Ray reserves per worker."""
    cores: PositiveInt = 1
    """CPU cores per worker: its affinity and its number of compute threads."""
    resources: dict[str, Annotated[float, msgspec.Meta(ge=0)]] = {}
    """Custom Ray resources per worker."""
    block_size: PositiveInt | None = None
    """Tokens per KV block; None: `engine.block_size`. Pools may differ: blocks are re-sliced on arrival."""
    kv_blocks: PositiveInt | None = None
    """Size of the KV pool in blocks; None: derived from `kv_memory_mib`."""
    kv_memory_mib: PositiveInt | None = None
    """Memory of the KV pool per worker; None: derived from `memory_mib`."""
    memory_mib: PositiveInt | None = None
    """Memory of a worker in all (on a GPU: of the GPU). What weights and the largest step leave becomes the KV pool;
    None: a KV pool of 512 MiB on a CPU, nine tenths of its memory on a GPU."""

    @property
    def may_use_gpu(self) -> bool:
        """Whether its workers may compute on a GPU, as far as the configuration tells."""
        return self.device == "cuda" or (self.device == "auto" and self.gpus > 0)


class EngineConfig(_Section, frozen=True):
    """How a worker batches."""

    block_size: PositiveInt = 16
    """Tokens per KV block."""
    max_batch_tokens: PositiveInt = 512
    """Token budget of one step; a longer prompt is computed in chunks."""
    max_batch_requests: PositiveInt = 32
    """Requests that may run at once."""
    policy: Literal["prefill_first", "mixed"] = "mixed"
    """`mixed`: decodes first, prefill chunks in the rest of the budget; `prefill_first`: prompts alone."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """What computes Baton's own decoder on a CPU: `native`, one call into C++ a step; `torch`; `auto`: native where its
    library was built and fits the model."""
    attention: Literal["auto", "torch", "native", "flashinfer"] = "auto"
    """Of models that torch computes: `native` on CPUs, `flashinfer` on GPUs, `torch` anywhere; `auto`: the fastest."""
    cuda_graphs: bool = True
    """On a GPU: capture decode steps at the start and replay them; of models that Baton's own decoder computes."""
    step_time_target_ms: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    """A step with decodes should not take longer: prompts get smaller chunks beside them, and no more requests are
    admitted than decode within it. Learned from the steps that ran; None: only the budgets above count."""
    log_steps: bool = False
    """Log each step's plan and its reasons, whatever `log_level` is."""
    record_steps: bool = False
    """Keep what each step was and what it took (`baton.step_log`), for who takes it from the cluster's handle."""
    model_impl: Literal["auto", "baton", "transformers"] = "auto"
    """What computes the model: `baton`, Baton's own decoder; `transformers`, its module with Baton's attention, slower;
    `auto`: Baton's where it has the architecture."""
    prefix_cache: bool = True
    """Keep the KV blocks of ended requests while there is room, and share those of equal prompt starts."""


class TransferConfig(_Section, frozen=True):
    """How KV blocks move from prefill to decode."""

    transport: str = "auto"
    """`inproc`: within one process. `shm`: same machine only, between CPU pools; decode copies out of prefill's pool.
    `zmq+ipc`: same machine only. `gloo`, `nccl`: torch.distributed, CPU or GPU pools. `nixl`: NVIDIA's library (extra
    `nixl`). `cuda-ipc`: between GPU pools of one machine.
    `auto`: `inproc` in one process, `shm` on the CPUs of one node, else `zmq+tcp`.
    `faulty+` before any of these, and a plan of faults after it, is for tests and rehearsals: blocks are lost, delayed
    and damaged, links cut (`faulty+zmq+tcp?drop=0.01&seed=3`, see `kv_transfer.faulty_transport`)."""
    wire_encoding: Literal["none", "int8", "fp8"] = "none"
    """Send KV blocks in one byte a number, with a scale per layer, head and block: less to send, and other tokens than
    without, now and then. Over `zmq+tcp` or `zmq+ipc`."""
    checksum: Literal["xxh3", "none"] = "xxh3"
    """Per-block checksum, verified by the decode worker before a block is used."""
    lease_s: Seconds = 30.0
    """A transfer that makes no progress for this long ends; queueing for credit does not count."""
    expected_growth: NonNegativeInt = 256
    """Decode reserves blocks for the prompt plus min(max_tokens, this) tokens."""
    max_unacked_blocks: PositiveInt = 4096
    """Blocks that may be on their way to one peer: handed to the transport, and not sent yet (or, of a transport that
    pulls, not fetched yet). A transfer whose blocks have all left takes no share of it while it waits for its Ack."""

    @property
    def transport_kind(self) -> str:
        """`transport` without faults: one of `TRANSPORTS`."""
        return self.transport.removeprefix(FAULTY).partition("?")[0].removesuffix("://")


class RouterConfig(_Section, frozen=True):
    """Where clients connect and how requests are placed."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Port of the ZeroMQ front; 0: any free one."""
    prefill_policy: PolicyName = "least_loaded"
    """Which prefill worker gets a request. `least_loaded`: the fewest queued steps; `least_outstanding_tokens`: tokens;
    `round_robin`, `random`; `power_of_two`: of two random ones the one with fewer tokens; `session`: the one of its
    session; `kv_aware`: queue and computing in milliseconds, less what is cached there; `slo_aware`: the same, within
    `slo_ttft_ms` whoever has least to compute."""
    decode_policy: PolicyName = "least_loaded"
    """Which decode worker. `least_loaded`: by its shares of batch and KV pool in use; `kv_aware`: its steps and what
    must be sent there, in milliseconds; `slo_aware`: the same, within `slo_tbt_ms` to whom least must be sent."""
    conditional_split: bool = False
    """A request whose prompt is short, or cached at a decode worker, may be prefilled there, where that is predicted to
    be faster for it and delays nobody beyond `slo_tbt_ms` (without that: to more than twice a step)."""
    max_requests: PositiveInt = 4096
    """Requests in the system at once; one more is refused as overloaded."""
    max_handoffs: PositiveInt | None = None
    """Requests that may be on their way to one decode worker: placed, and not decoding there yet. Where all have so
    many, a request waits in the router's queue. None: twice as many as the worker runs at once."""
    max_queue: NonNegativeInt | None = None
    """Requests that may wait in the router's queue; one more is refused as overloaded, or the least important one is in
    its place. None: only `max_requests` counts."""
    slo_ttft_ms: Milliseconds | None = None
    """Time to the first token that is promised: a request for which more is predicted, by the workers' own measured
    times, is refused as overloaded at once, unless its priority is below 0. None: nothing is refused for that."""
    slo_tbt_ms: Milliseconds | None = None
    """Time between two tokens that is promised, for policies that predict it."""
    request_timeout_s: Seconds | None = None
    """A request that takes longer fails, wherever it is by then; None: no limit. A request may ask for less."""
    max_attempts: PositiveInt = 3
    """Times a request is placed before it fails, the first included."""
    retry_backoff_s: Seconds = 0.1
    """A request that failed is placed again at once; if it fails again, after so long, and twice as long each time."""
    retry_backoff_max_s: Seconds = 2.0
    """The longest of these waits."""
    breaker_failures: NonNegativeInt = 5
    """A worker that fails so often within `breaker_window_s`, and succeeds no more often, gets nothing new while
    others can take it; 0: never."""
    breaker_window_s: Seconds = 10.0
    breaker_cooldown_s: Seconds = 1.0
    """After so long such a worker is tried with one request. If that fails too, it is left alone for twice as long."""
    breaker_cooldown_max_s: Seconds = 60.0
    """The longest of these times."""
    worker_wait_s: Seconds = 60.0
    """How long a request that lost its worker waits for one to come back where no other can take it."""
    shutdown_grace_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 5.0
    """How long a router that stops lets open requests get to their end, while it refuses new ones; 0: not at all."""


class HttpConfig(_Section, frozen=True):
    """The HTTP server in the router's process: OpenAI's API, health, metrics and the page."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """0: any free one; `baton status` tells which."""
    model_names: tuple[str, ...] = ()
    """Names under which clients ask for the model, the first one is shown; none: made of `model.source`."""
    api_keys: tuple[ApiKey, ...] = ()
    """Clients send one of them as `Authorization: Bearer KEY`. None: BATON_API_KEY of the environment, and without that
    anyone may ask. 16 characters or more each."""
    max_body_mib: PositiveInt = 8
    """Size of a request's body. Reading one holds up the router, about 0.1 s a MiB of token ids."""
    cors_origins: tuple[Annotated[str, msgspec.Meta(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]+)$")], ...] = ()
    """Web pages of these origins (`https://host`, `https://host:port`) may ask from a browser; `*`: of any."""
    tls_certificate: str | None = None
    """File with a certificate chain in PEM; with it the server speaks HTTPS only."""
    tls_key: str | None = None
    """File with its key; None: in `tls_certificate` too."""
    read_timeout_s: Seconds = 60.0
    """A request whose headers and body have not arrived after so long is ended."""
    write_timeout_s: Seconds = 60.0
    """A client that takes none of its answer for so long is disconnected."""
    metrics_prefix: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_:]*$")] = "baton:"
    """Before the names of metrics; vLLM's is `vllm:`."""
    ui: bool = True
    """Serve the page `/ui`."""


class PlannerConfig(_Section, frozen=True):
    """Prefill workers become decode workers, and the other way round, as the traffic changes (`router.role_planner`).

    A phase's load is the share of its workers that the work for it takes; above 1 they cannot keep up.
    """

    enabled: bool = False
    interval_s: Seconds = 2.0
    """How often it looks."""
    smoothing_s: Seconds = 20.0
    """What was seen so long ago counts a third of what is seen now. Shorter: sooner, and on weaker evidence."""
    horizon_s: Seconds = 10.0
    """Within so long prefill should have computed the prompts that wait, beside those that come meanwhile."""
    high: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.85
    """A phase with this load or more gets a worker, ..."""
    low: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.5
    """... if the other one has this load or less, and stays below `high` without it."""
    dwell_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 120.0
    """So long a worker keeps the role that it has."""
    cooldown_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 60.0
    """So long nothing is changed after a change has ended."""
    max_changes_per_minute: PositiveInt = 2
    """Whatever the load does."""
    min_prefill: PositiveInt = 1
    """Prefill workers that are left in any case."""
    min_decode: PositiveInt = 1
    give_up_s: Seconds = 600.0
    """A change that takes longer is given up, and its worker gets requests again. Most of that time the worker finishes
    the requests that it has."""


class TracingConfig(_Section, frozen=True):
    """OpenTelemetry spans of requests; needs the extra `otel`."""

    endpoint: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/]+")] | None = None
    """Where a collector takes OTLP over HTTP, such as http://127.0.0.1:4318; None: where OTEL_EXPORTER_OTLP_ENDPOINT of
    the environment says, and without that there are no spans."""
    sample_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """Of the requests that come without a trace of their client's; with one, what that says holds."""


class LivenessConfig(_Section, frozen=True):
    """When a silent peer counts as lost."""

    heartbeat_s: Seconds = 0.5
    timeout_s: Seconds = 2.0


class SecurityConfig(_Section, frozen=True):
    """Who may speak on the cluster's sockets."""

    secret: Secret | None = None
    """Shared by all workers, the router and its clients: every socket is encrypted (CurveZMQ) and lets only holders in.
    None: BATON_SECRET of the environment, and without that anyone who reaches a port may use it. 16 characters or more.
    """


class ClusterConfig(_Section, frozen=True):
    """The whole of `cluster.yaml`."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")] = "baton"
    """Tells clusters on one machine apart; `baton submit --cluster NAME`."""
    launcher: Literal["ray", "local"] = "ray"
    """`ray`: one actor process per worker; `local`: all workers as threads of one process."""
    model: ModelConfig = ModelConfig()
    pools: dict[str, PoolConfig] = msgspec.field(
        default_factory=lambda: {"prefill": PoolConfig(), "decode": PoolConfig()}
    )
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    http: HttpConfig = HttpConfig()
    planner: PlannerConfig = PlannerConfig()
    tracing: TracingConfig = TracingConfig()
    liveness: LivenessConfig = LivenessConfig()
    ray: RayConfig = RayConfig()
    security: SecurityConfig = SecurityConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Of Baton's own lines on the standard error of its processes; under Ray that is a file in its session's `logs`.
    `info` has a line for each request that ends."""
    log_format: Literal["text", "json"] = "text"
    """`json`: one object a line, for programs that collect logs."""
    start_timeout_s: Seconds = 120.0
    """`up` fails if the cluster is not ready within this."""

    def role_of(self, pool: str) -> Role:
        """The role of a pool: its own `role`, else its name."""
        return self.pools[pool].role or pool  # type: ignore[return-value]  # validated at load

    def block_size_of(self, pool: PoolConfig) -> int:
        """Tokens per KV block of a pool."""
        return pool.block_size or self.engine.block_size

    @property
    def mixes_block_sizes(self) -> bool:
        """Whether blocks may have to be re-sliced between workers."""
        return len({self.block_size_of(pool) for pool in self.pools.values() if pool.workers}) > 1


SECRET_VARIABLE = "BATON_SECRET"
API_KEY_VARIABLE = "BATON_API_KEY"
TRANSPORTS = ("auto", "inproc", "shm", "zmq+tcp", "zmq+ipc", "gloo", "nccl", "nixl", "cuda-ipc")
FAULTY = "faulty+"
"""Before a transport's name: the same with faults, for tests and rehearsals."""
UNENCRYPTED_TRANSPORTS = ("gloo", "nccl", "nixl")
"""They move blocks between machines by libraries that neither encrypt nor ask who connects."""

FIXED_BLOCK_TRANSPORTS = ("shm", "gloo", "nccl", "nixl", "cuda-ipc")
"""They move blocks as they are, between pools of one block size."""
ENCODING_TRANSPORTS = ("auto", "zmq+tcp", "zmq+ipc")
"""They can send encoded blocks."""

_ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


def load_config(path: str | Path | None = None, overrides: dict[str, Any] | None = None) -> ClusterConfig:
    """Read `path` (None: all defaults), apply dotted `overrides` (`{"engine.block_size": 32}`), validate.

    A missing `security.secret` is taken from BATON_SECRET of the environment, `http.api_keys` from BATON_API_KEY.
    Raises ConfigError for a file that cannot be read, an unknown key, a wrong type or an impossible value.
    """
    tree: Any = {}
    source = "configuration"
    if path is not None:
        source = str(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as e:
            raise ConfigError(source, f"cannot be read: {e.strerror or e}") from e
        except UnicodeDecodeError as e:
            raise ConfigError(source, f"is not text in UTF-8: {e}") from e
        tree = parse_yaml(text, source)
        tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(source, f"must hold a mapping of sections, not {type(tree).__name__}")
    if "pools" not in tree and any(dotted.startswith("pools.") for dotted in overrides or {}):
        tree["pools"] = {name: {} for name in ClusterConfig().pools}  # they change the default pools, not replace them
    for dotted, value in (overrides or {}).items():
        _set_dotted(tree, dotted, value)
    return parse_config(tree, with_environment=True)


def environment_secret() -> Secret | None:
    """BATON_SECRET; None where it is unset or empty. Raises ConfigError if it is too short."""
    text = os.environ.get(SECRET_VARIABLE)
    return Secret(text) if text else None


def parse_yaml(text: str, source: str) -> Any:
    """What YAML says; a ConfigError of one line that names `source` where it says nothing."""
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark
        at = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(source, f"is not valid YAML{at}: {e.problem or e.context}") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # ValueError: dates and numbers that are none
        raise ConfigError(source, f"is not valid YAML: {' '.join(str(e).split())}") from e


def parse_config(tree: dict[str, Any], *, with_environment: bool = False) -> ClusterConfig:
    """Validate a plain mapping (as YAML gives it) into a ClusterConfig; raises ConfigError.

    `with_environment`: secrets that it lacks are taken from the environment.
    """
    try:
        config = msgspec.convert(tree, ClusterConfig, strict=True, dec_hook=_read_secret)
    except msgspec.ValidationError as e:
        raise _locate(tree, ClusterConfig, "") or ConfigError("configuration", str(e)) from None
    if with_environment:
        if config.security.secret is None and (secret := environment_secret()) is not None:
            config = msgspec.structs.replace(config, security=SecurityConfig(secret=secret))
        if not config.http.api_keys and (key := os.environ.get(API_KEY_VARIABLE)):
            config = msgspec.structs.replace(config, http=msgspec.structs.replace(config.http, api_keys=(ApiKey(key),)))
    _check_consistency(config)
    return config


def dump_config(config: ClusterConfig, *, with_secret: bool = False) -> dict[str, Any]:
    """The resolved configuration as plain data, all defaults filled in.

    `with_secret`: for a process that is to run it. Else secrets are replaced by a text that `parse_config` refuses.
    """
    plain: dict[str, Any] = msgspec.to_builtins(
        config, enc_hook=lambda secret: secret.reveal() if with_secret else NOT_SHOWN
    )
    return plain


NOT_SHOWN = "<not shown>"
"""Shorter than any secret."""


def _read_secret(kind: type, value: Any) -> Any:
    assert issubclass(kind, Secret), kind
    return value if isinstance(value, kind) else kind(value)


_SECTIONS_WITH_SECRETS = ("security", "http")
_SECRET_NAME = re.compile("secret|key", re.IGNORECASE)


def _shown(path: str, value: Any) -> Any:
    """What an error at `path` may say of the value: of all that may be or hold a secret, nothing.

    By the name, misspelt ones included, and where a whole section was expected.
    """
    hidden = path.partition(".")[0] == "security" or path in _SECTIONS_WITH_SECRETS or _SECRET_NAME.search(path)
    holds_some = isinstance(value, dict | list) and _SECRET_NAME.search(repr(value))
    return None if hidden or holds_some else value


def _check_consistency(config: ClusterConfig) -> None:
    for name, pool in config.pools.items():
        if pool.role is None and name not in _ROLES:
            raise ConfigError(
                f"pools.{name}.role", "is required, because the pool's name is not a role", allowed=", ".join(_ROLES)
            )
        others = [key for key in ("kv_memory_mib", "kv_blocks") if getattr(pool, key) is not None]
        if pool.memory_mib is not None and others:
            raise ConfigError(
                f"pools.{name}.memory_mib",
                f"cannot be combined with {' and '.join(others)}, which sets the KV pool's size by itself",
                value=pool.memory_mib,
                allowed=f"null, or {' and '.join(others)} set to null",
            )
    workers = {role: sum(p.workers for n, p in config.pools.items() if config.role_of(n) == role) for role in _ROLES}
    if not workers["both"] and not (workers["prefill"] and workers["decode"]):
        raise ConfigError(
            "pools",
            f"cannot serve a request: {workers['prefill']} prefill, {workers['decode']} decode and 0 both workers",
            allowed="at least one `both` worker, or at least one `prefill` and one `decode` worker",
        )
    if config.liveness.timeout_s < 2 * config.liveness.heartbeat_s:
        raise ConfigError(
            "liveness.timeout_s",
            "must be at least twice liveness.heartbeat_s, or one late beat loses a worker",
            value=config.liveness.timeout_s,
            allowed=f">= {2 * config.liveness.heartbeat_s}",
        )
    transport = config.transfer.transport_kind
    with_faults = config.transfer.transport.startswith(FAULTY)
    if transport not in TRANSPORTS or not (with_faults or transport == config.transfer.transport):
        raise ConfigError(
            "transfer.transport",
            "has an impossible value",
            value=config.transfer.transport,
            allowed=f"{', '.join(TRANSPORTS)}; for rehearsals {FAULTY}zmq+tcp?drop=0.01&seed=3, or so",
        )
    if transport == "shm":
        for name, pool in config.pools.items():
            if pool.device == "cuda":
                problem = "cannot be cuda with transfer.transport: shm, which maps memory of the CPU"
                raise ConfigError(f"pools.{name}.device", problem, value="cuda", allowed="cpu")
    if transport == "cuda-ipc":
        for name, pool in config.pools.items():
            if not pool.may_use_gpu:
                problem = "must be cuda with transfer.transport: cuda-ipc, which maps memory of GPUs"
                raise ConfigError(f"pools.{name}.device", problem, value=pool.device, allowed="cuda")
    _check_formats(config)
    _check_http(config)
    _check_planner(config)
    if config.security.secret is not None and transport in UNENCRYPTED_TRANSPORTS and config.ray.address:
        raise ConfigError(
            "transfer.transport",
            "would send KV blocks in clear between machines, while security.secret is set",
            value=transport,
            allowed="auto, zmq+tcp, or a network of your own that you trust, without a secret",
        )
    if transport == "inproc" and config.launcher == "ray":
        raise ConfigError(
            "transfer.transport",
            "cannot join workers in separate processes",
            value="inproc",
            allowed="auto, shm or zmq+tcp with launcher: ray",
        )


def _check_http(config: ClusterConfig) -> None:
    http = config.http
    if http.tls_key is not None and http.tls_certificate is None:
        raise ConfigError("http.tls_key", "has no effect without http.tls_certificate", value=http.tls_key)
    if http.enabled and config.security.secret is not None and not http.api_keys and not is_loopback(http.host):
        raise ConfigError(
            "http.api_keys",
            f"is empty, so that on http.host {http.host} HTTP would let everybody in, while security.secret keeps "
            "everybody out",
            allowed=f"at least one key (or {API_KEY_VARIABLE}), http.host: 127.0.0.1, or http.enabled: false",
        )


def _check_planner(config: ClusterConfig) -> None:
    """A worker that changes its role starts anew in the other pool, with what it has there."""
    planner = config.planner
    if not planner.enabled:
        return
    if planner.low >= planner.high:
        raise ConfigError(
            "planner.low",
            f"must be below planner.high, {planner.high:g}, or workers would change there and back",
            value=planner.low,
            allowed=f"< {planner.high:g}",
        )
    names: dict[Role, list[str]] = {role: [] for role in _ROLES}
    for name, pool in config.pools.items():
        if pool.workers or config.role_of(name) != "both":
            names[config.role_of(name)].append(name)
    if names["both"] or len(names["prefill"]) != 1 or len(names["decode"]) != 1:
        raise ConfigError(
            "planner.enabled",
            f"needs one pool of each role, and these are prefill: {', '.join(names['prefill']) or 'none'}; "
            f"decode: {', '.join(names['decode']) or 'none'}; both: {', '.join(names['both']) or 'none'}",
            value=True,
            allowed="one prefill pool, one decode pool and no workers of role both, or planner.enabled: false",
        )
    (prefill,), (decode,) = names["prefill"], names["decode"]
    one, other = config.pools[prefill], config.pools[decode]
    for key in ("device", "gpus", "cores", "resources"):
        if getattr(one, key) != getattr(other, key):
            raise ConfigError(
                "planner.enabled",
                f"needs pools whose workers have the same resources: pools.{prefill}.{key} is {getattr(one, key)}, "
                f"pools.{decode}.{key} is {getattr(other, key)}",
                value=True,
                allowed=f"the same {key} for both, or planner.enabled: false",
            )
    for pool, key in ((one, "min_prefill"), (other, "min_decode")):
        least = getattr(planner, key)
        if pool.workers < least:
            problem = f"is more than the workers of that pool, {pool.workers}"
            raise ConfigError(f"planner.{key}", problem, value=least, allowed=f"1 to {pool.workers}")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a socket bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_formats(config: ClusterConfig) -> None:
    """Blocks that are re-sliced or encoded on their way need a transport that can carry them."""
    transport = config.transfer.transport_kind
    if config.mixes_block_sizes and transport in FIXED_BLOCK_TRANSPORTS:
        sizes = {name: config.block_size_of(pool) for name, pool in config.pools.items() if pool.workers}
        name = next(name for name in sizes if config.pools[name].block_size is not None)
        raise ConfigError(
            f"pools.{name}.block_size",
            f"differs between pools ({', '.join(f'{pool}: {size}' for pool, size in sizes.items())}), and "
            f"transfer.transport: {transport} moves blocks as they are",
            value=sizes[name],
            allowed="one block size for all, or transfer.transport: auto, inproc, zmq+tcp or zmq+ipc",
        )
    if config.transfer.wire_encoding != "none" and transport not in ENCODING_TRANSPORTS:
        raise ConfigError(
            "transfer.wire_encoding",
            f"has no effect with transfer.transport: {transport}, which moves blocks as they are",
            value=config.transfer.wire_encoding,
            allowed=f"none, or transfer.transport: {', '.join(ENCODING_TRANSPORTS)}",
        )


def _set_dotted(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    node = tree
    for key in parents:
        child = node.get(key)
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            value = None if parents[0] in _SECTIONS_WITH_SECRETS else _shown(dotted, child)
            raise ConfigError(dotted, f"cannot be set: {key} is not a section", value=value)
        node = child
    node[last] = value


def _locate(value: Any, expected: Any, path: str) -> ConfigError | None:
    """The first mistake in `value`, read as `expected`: its path, the value, and what is allowed there."""
    here = path or "configuration"
    if isinstance(expected, type) and issubclass(expected, msgspec.Struct):
        if not isinstance(value, dict):
            shown = _shown(here, value)
            return ConfigError(here, "must be a mapping", value=shown, allowed=", ".join(expected.__struct_fields__))
        fields = {field.name: field.type for field in msgspec.structs.fields(expected)}
        for key, child in value.items():
            child_path = f"{path}.{key}" if path else str(key)
            if key not in fields:
                close = difflib.get_close_matches(str(key), fields, n=1)
                hint = f"unknown key, did you mean `{close[0]}`?" if close else "unknown key"
                return ConfigError(child_path, hint, value=_shown(child_path, child), allowed=", ".join(sorted(fields)))
            if (error := _locate(child, fields[key], child_path)) is not None:
                return error
        return None
    if get_origin(expected) is dict and isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                return ConfigError(here, "keys must be text", value=key)
            if (error := _locate(child, get_args(expected)[1], f"{path}.{key}")) is not None:
                return error
        return None
    try:
        msgspec.convert(value, expected, strict=True, dec_hook=_read_secret)
    except msgspec.ValidationError as e:
        return ConfigError(
            here, "has an impossible value", value=_shown(here, value), allowed=_allowed(expected, str(e))
        )
    return None


def _allowed(expected: Any, problem: str) -> str:
    """The choices of a Literal, else msgspec's words: `Expected `int` >= 1, got ...` -> `int >= 1`."""
    options = get_args(expected) if get_origin(expected) in (Union, UnionType) else (expected,)
    choices = [str(choice) for option in options if get_origin(option) is Literal for choice in get_args(option)]
    if choices:
        return ", ".join(choices)
    match = re.match(r"Expected (.+?)(?:, got .*| - at .*)?$", problem)
    return (match[1] if match else problem).replace("`", "")

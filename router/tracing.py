"""OpenTelemetry: a span per request, with one below it for each stage of its timeline.

The only module that imports OpenTelemetry (the extra `otel`), and only where an endpoint is configured. Spans are made
when a request has ended, from its record, on a thread of their own: the router's thread does no more than hand the
record over. Attributes are those of the semantic conventions for generative AI, and Baton's own as `baton.*`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from baton.config import ClusterConfig
from baton.errors import ConfigError
from baton.timeline import Mark, RequestTimeline, Stage
from router.actions import RequestDone, RequestFailed, RouterAction
from router.core import RouterCore
from router.records import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("baton.router")

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MAX_WAITING = 4096
"""Requests whose spans are not made yet; those that come while so many wait get none."""
CLOSE_S = 2.0
"""For what has not been sent when the router ends."""
DECODE_STAGES = frozenset((Stage.DECODE_QUEUE, Stage.FIRST_DECODE_STEP, Stage.DECODE_STEPS))
ROUTER_STAGES = frozenset((Stage.ROUTER_QUEUE, Stage.PLACEMENT))


def open_tracing(config: ClusterConfig, model_name: str, core: RouterCore, counters: Counter[str]) -> Tracing | None:
    """None where nobody asks for traces. ConfigError if the extra `otel` is not installed."""
    endpoint = config.tracing.endpoint
    if endpoint is None and not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as e:
        raise ConfigError(
            "tracing.endpoint",
            "needs OpenTelemetry, which is not installed",
            value=endpoint or "of the environment",
            allowed="null and no OTEL_EXPORTER_OTLP_ENDPOINT, or `pip install baton-serve[otel]`",
        ) from e
    if endpoint is not None and urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return Tracing(config, model_name, core, counters, OTLPSpanExporter(endpoint=endpoint))


class _Ended(NamedTuple):
    record: RequestRecord
    at: float
    """On the router's clock."""
    headers: Mapping[str, str]
    operation: str


class Tracing:
    """Observes one router's requests. `close` sends what is left."""

    def __init__(
        self,
        config: ClusterConfig,
        model_name: str,
        core: RouterCore,
        counters: Counter[str],
        exporter: SpanExporter,
    ):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = {"service.name": "baton", "service.namespace": config.name, "service.instance.id": core.incarnation}
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.tracing.sample_share)),
            resource=Resource.create(resource),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("baton.router")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model_name
        self._core = core
        self._counters = counters
        self._ended: queue.Queue[_Ended | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="baton-tracing", daemon=True)
        self._thread.start()

    def on_action(self, action: RouterAction, now: float) -> None:
        kind = type(action)
        if kind is RequestDone or kind is RequestFailed:
            record = self._core.record(action.request_id)  # type: ignore[union-attr]
            if record is None:
                return  # it was refused
            client: Any = action.client  # type: ignore[union-attr]
            headers = getattr(client, "trace_headers", {})
            try:
                self._ended.put_nowait(_Ended(record, now, headers, getattr(client, "operation", "text_completion")))
            except queue.Full:
                self._counters["traces_dropped"] += 1

    def close(self) -> None:
        """Send what is left, if that can be done soon."""
        until = time.monotonic() + CLOSE_S
        try:
            self._ended.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)
        closing = threading.Thread(target=self._provider.shutdown, name="baton-tracing-end", daemon=True)
        closing.start()
        closing.join(max(0.0, until - time.monotonic()))

    # --- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while (ended := self._ended.get()) is not None:
            try:
                self._tell(ended)
            except Exception:
                log.exception("a request's spans could not be made")

    def _tell(self, ended: _Ended) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        record = ended.record
        clock = _wall_clock(time.time_ns(), time.monotonic())
        marks = record.marks
        parent = self._propagator.extract(ended.headers)
        whole = self._tracer.start_span(
            f"{ended.operation} {self._model}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=request_attributes(record, ended.operation, self._model),
            start_time=clock(marks.get(Mark.RECEIVED, ended.at)),
        )
        if whole.is_recording():
            context = set_span_in_context(whole)
            worker_of = _workers(record)
            at = marks.get(Mark.RECEIVED, ended.at)
            for stage, seconds in RequestTimeline(marks=marks).stages().items():
                attributes = {"baton.worker": worker_of[stage]} if stage in worker_of else {}
                span = self._tracer.start_span(str(stage), context=context, attributes=attributes, start_time=clock(at))
                at += seconds
                span.end(clock(at))
            if record.retried:
                whole.add_event("retry", {"baton.reason": record.retried})
            if record.finish_reason == "error":
                whole.set_status(Status(StatusCode.ERROR, record.error))
        whole.end(clock(max(ended.at, marks.get(Mark.FINISHED, ended.at))))


def request_attributes(record: RequestRecord, operation: str, model: str) -> dict[str, Any]:
    """Of a request's span."""
    timeline = RequestTimeline(marks=record.marks)
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.finish_reasons": [record.finish_reason],
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "baton.attempts": record.attempts,
    }
    if record.placements:
        attributes["baton.prefill_worker"] = record.placements[-1].prefill
        attributes["baton.decode_worker"] = record.placements[-1].decode
    if (ttft := timeline.ttft()) is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = ttft
    if record.finish_reason == "error":
        attributes["error.type"] = "request_failed"
    return attributes


def _workers(record: RequestRecord) -> dict[Stage, str]:
    if not record.placements:
        return {}
    last = record.placements[-1]
    return {s: last.decode if s in DECODE_STAGES else last.prefill for s in Stage if s not in ROUTER_STAGES}


def _wall_clock(wall_ns: int, monotonic: float) -> Callable[[float], int]:
    """From seconds on the router's clock to nanoseconds since the epoch, by both clocks' readings of one moment."""
    return lambda at: wall_ns + round((at - monotonic) * 1e9)

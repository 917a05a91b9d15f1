"""A request's spans: one for all of it, one for each stage, in the trace of whoever asked."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode

from baton.config import ClusterConfig
from baton.errors import ConfigError
from baton.sampling_params import SamplingParams
from baton.timeline import Stage
from router import tracing
from router.desk import Sink
from router.tracing import Tracing, open_tracing
from tests.fakes_router import config_of, out
from tests.observed import Observed

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Kept(SpanExporter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


def traced(run: Callable[[Observed], object], **sections: Any) -> list[ReadableSpan]:
    """The spans that come of it, the request's first."""
    s = Observed("p0", "d0", config=config_of(**sections))
    kept = Kept()
    observer = Tracing(s.config, "model-a", s.core, s.counters, kept)
    s.observers.append(observer)
    run(s)
    observer.close()
    assert not s.counters
    return sorted(kept.spans, key=lambda span: span.parent is not None and not span.parent.is_remote)


class Page(Sink):
    """An HTTP client that is part of a trace."""

    def __init__(self, flags: str = "01", operation: str = "chat"):
        self.trace_headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "vendor=1"}
        self.operation = operation


def ask(s: Observed, client: object) -> None:
    """A request of its own that fails, as no worker answers."""
    s.done(s.core.on_generate(client, "x", "id-1", 7, (1, 2, 3), SamplingParams(max_tokens=3), s.now))
    s.done(s.core.on_cancel(client, "x", s.now))


def test_a_span_for_the_request_and_one_for_each_stage() -> None:
    whole, *stages = traced(lambda s: s.run(gap=0.5, tokens=5))
    assert (whole.name, whole.kind, whole.parent) == ("text_completion model-a", SpanKind.SERVER, None)
    assert [span.name for span in stages] == list(Stage)
    assert all(s.parent is not None and s.parent.span_id == whole.context.span_id for s in stages)
    assert len({span.context.trace_id for span in (whole, *stages)}) == 1
    ends = [whole.start_time, *(span.end_time for span in stages)]
    assert [span.start_time for span in stages] == ends[:-1], "each begins where the one before it ends"
    seconds = {
        span.name: (span.end_time - span.start_time) / 1e9 for span in stages if span.end_time and span.start_time
    }
    assert seconds[Stage.WIRE] == pytest.approx(0.25, abs=1e-6)
    assert seconds[Stage.DECODE_STEPS] == pytest.approx(1.0, abs=1e-6)
    assert whole.end_time == stages[-1].end_time
    workers = [span.attributes.get("baton.worker") for span in stages if span.attributes is not None]
    assert workers == [None, None, "p0", "p0", "p0", "p0", "d0", "d0", "d0"]


def test_attributes_are_those_of_the_conventions() -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as names

    whole, *_ = traced(lambda s: s.run(gap=0.5, tokens=5))
    assert whole.attributes is not None
    told = dict(whole.attributes)
    assert told[names.GEN_AI_OPERATION_NAME] == "text_completion"
    assert told["gen_ai.provider.name"] == "baton"
    assert told[names.GEN_AI_REQUEST_MODEL] == told[names.GEN_AI_RESPONSE_MODEL] == "model-a"
    assert told[names.GEN_AI_RESPONSE_ID] == Observed.id("x")
    assert told[names.GEN_AI_RESPONSE_FINISH_REASONS] == ("length",)
    assert (told[names.GEN_AI_USAGE_INPUT_TOKENS], told[names.GEN_AI_USAGE_OUTPUT_TOKENS]) == (6, 5)
    assert told[names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] == 2
    assert told[names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] == pytest.approx(1.0)
    assert (told["baton.prefill_worker"], told["baton.decode_worker"], told["baton.attempts"]) == ("p0", "d0", 1)
    assert whole.status.status_code is StatusCode.UNSET
    assert {k: whole.resource.attributes[k] for k in ("service.name", "service.namespace", "service.instance.id")} == {
        "service.name": "baton",
        "service.namespace": "baton",
        "service.instance.id": "router#1",
    }


def test_times_are_of_the_wall_clock() -> None:
    before = time.time_ns()

    def now(s: Observed) -> None:
        s.now = time.monotonic()
        s.generate()
        s.cancel()

    whole, *_ = traced(now)
    assert whole.start_time is not None
    assert whole.end_time is not None
    assert before - 50_000_000 <= whole.start_time <= whole.end_time <= time.time_ns() + 50_000_000


def test_a_clients_trace_goes_on() -> None:
    whole, *_ = traced(lambda s: ask(s, Page()))
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert whole.context.trace_state == {"vendor": "1"}
    assert whole.name == "chat model-a"


def test_a_client_that_is_not_traced_is_not_traced_here() -> None:
    assert traced(lambda s: ask(s, Page(flags="00"))) == []


def test_headers_that_mean_nothing_begin_a_trace() -> None:
    page = Page()
    page.trace_headers = {"traceparent": "nonsense", "tracestate": ""}
    (whole, *_) = traced(lambda s: ask(s, page))
    assert whole.parent is None


def test_a_share_of_the_requests() -> None:
    def run(s: Observed) -> None:
        for i in range(200):
            s.generate(f"r{i}")
            s.cancel(f"r{i}")

    def whole(spans: list[ReadableSpan]) -> int:
        return sum(span.parent is None for span in spans)

    assert whole(traced(run, tracing__sample_share=0.0)) == 0
    assert 50 < whole(traced(run, tracing__sample_share=0.5)) < 150
    assert whole(traced(run)) == 200


def test_what_failed_says_so_and_what_was_refused_is_no_span() -> None:
    def run(s: Observed) -> None:
        s.generate("refused", prompt=1000)
        s.generate("lost")
        s.failed("p0", s.key("lost"), "engine_error")

    whole, *_ = traced(run, router__max_attempts=1)
    assert whole.status.status_code is StatusCode.ERROR
    assert "it broke" in str(whole.status.description)
    assert whole.attributes is not None
    assert whole.attributes["error.type"] == "request_failed"


def test_a_retry_is_an_event() -> None:
    def run(s: Observed) -> None:
        s.generate("x", max_tokens=1)
        s.failed("p0", s.key("x"), "engine_error")
        s.wait(1.0, ["p0", "d0"])
        s.tokens("p0", out(s.key("x", attempt=1), 0, finish="length"))

    whole, *_ = traced(run)
    (event,) = whole.events
    assert event.name == "retry"
    assert event.attributes is not None
    assert "it broke" in str(event.attributes["baton.reason"])


def test_a_collector_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_WAITING", 4)
    monkeypatch.setattr(tracing, "CLOSE_S", 0.2)
    let_go = threading.Event()

    class Hanging(Kept):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            let_go.wait(30)
            return SpanExportResult.SUCCESS

    s = Observed("p0", "d0")
    observer = Tracing(s.config, "model-a", s.core, s.counters, Hanging())
    observer._tell = lambda ended: let_go.wait(30)  # type: ignore[assignment,return-value]
    s.observers.append(observer)
    for i in range(50):
        s.generate(f"r{i}")
        s.cancel(f"r{i}")
    assert s.counters["traces_dropped"] >= 44
    before = time.monotonic()
    observer.close()
    assert time.monotonic() - before < 10
    let_go.set()


def opened(config: ClusterConfig) -> Tracing | None:
    s = Observed(config=config)
    return open_tracing(config, "model-a", s.core, Counter())


def test_nobody_asks_nothing_is_imported() -> None:
    program = """
import sys
from collections import Counter
import router.server
from router.tracing import open_tracing
from tests.observed import Observed
s = Observed()
assert open_tracing(s.config, "m", s.core, Counter()) is None
assert not [name for name in sys.modules if name.startswith("opentelemetry")], "OpenTelemetry was imported"
"""
    environment = {"PATH": "", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=100)


def test_an_endpoint_without_the_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"tracing\.endpoint: needs OpenTelemetry.*baton-serve\[otel\]"):
        opened(config_of(tracing__endpoint="http://127.0.0.1:4318"))


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/otlp/traces", "https://collector/otlp/traces"),
    ],
)
def test_where_spans_are_sent(endpoint: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    from opentelemetry.exporter.otlp.proto.http import trace_exporter

    def exporter(endpoint: str) -> Kept:
        given.append(endpoint)
        return Kept()

    monkeypatch.setattr(trace_exporter, "OTLPSpanExporter", exporter)
    found = opened(config_of(tracing__endpoint=endpoint))
    assert found is not None
    found.close()
    assert given == [url]


def test_the_environment_may_say_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    found = opened(config_of())
    assert found is not None
    found.close()

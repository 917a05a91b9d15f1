"""The page `/ui` in a headless Chromium: before a real router whose workers make tokens up, and a fake one."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from baton.config import parse_config
from baton.engine.request import StepPlan
from router.server import RouterServer
from tests.fakes_router import LetterText
from tests.stub_cluster import StubCluster, expected_tokens, wait_until
from tests.ui.conftest import Browser
from tests.ui.fake_router import FakeRouter, overview, recent, worker

pytestmark = pytest.mark.timeout(600)  # the first test may have to install a browser

SPLIT = {"prefill": {"workers": 1, "kv_blocks": 64}, "decode": {"workers": 1, "kv_blocks": 64}}
KEY = "a-key-of-enough-letters"
QUESTION = "what is a baton"


class GatedCluster(StubCluster):
    """One prefill and one decode worker; the steps of the latter wait until they are let through."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        """Set: steps wait no more."""
        self.num_waiting = 0
        self._steps = threading.Semaphore(0)
        super().__init__(SPLIT, step_s=self._wait)

    def let_through(self, steps: int) -> None:
        self._steps.release(steps)

    def _wait(self, worker_id: str, plan: StepPlan) -> float:
        if worker_id.startswith("decode"):
            self.num_waiting += 1
            while not self.gate.is_set() and not self._steps.acquire(timeout=0.01):
                pass
            self.num_waiting -= 1
        return 0.0

    def stop(self) -> None:
        self.gate.set()
        super().stop()


def get(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body; redirects are not followed."""

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    try:
        with urllib.request.build_opener(Stay).open(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as e:
        return e.code, dict(e.headers), e.read()


def url_of(cluster: StubCluster) -> str:
    assert cluster.router.url is not None
    return cluster.router.url


def the_overview(cluster: StubCluster) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(get(f"{url_of(cluster)}/baton/overview")[2])
    return shown


def send(browser: Browser, text: str) -> None:
    browser.find("#message").send_keys(text, Keys.ENTER)


def settings(browser: Browser, **values: int | str) -> None:
    """Fill fields of the playground's settings."""
    details = browser.find("#ask details")
    if details.get_attribute("open") is None:
        browser.find("#ask summary").click()
    for name, value in values.items():
        field = browser.find(f"#{name.replace('_', '-')}")
        field.clear()
        field.send_keys(str(value))


# --- what is served ------------------------------------------------------------------------------------


def test_one_answer_that_may_run_its_own_script_only() -> None:
    with RouterServerRunning() as router:
        url = router.url
        status, headers, body = get(f"{url}/ui")
        assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-cache"
        page, policy = body.decode(), headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
        for tag, directive in (("script", "script-src"), ("style", "style-src")):
            (source,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
            assert f"{directive} 'sha256-{digest}'" in policy, "no other one runs"
        assert "{{" not in page.partition("<script>")[0], "a part that was not filled in"
        # Nothing else is fetched: no address of another file or host, but what names the namespace of SVG.
        assert not re.search(r"""\b(src|srcset)=|@import|url\(|<link (?!rel="icon" href="data:)""", page)
        assert set(re.findall(r"https?://[\w.]+", page)) == {"http://www.w3.org"}

        assert get(f"{url}/ui", **{"If-None-Match": headers["etag"]})[0] == 304
        status, headers, _ = get(f"{url}/")
        assert (status, headers["location"]) == (307, "ui")


def test_it_can_be_switched_off() -> None:
    with RouterServerRunning(ui=False) as router:
        assert [get(f"{router.url}{path}")[0] for path in ("/ui", "/", "/health")] == [404, 404, 200]


class RouterServerRunning:
    """A router without workers, on `port` or any."""

    def __init__(self, port: int = 0, **http: Any):
        self.server = RouterServer(parse_config({"http": {"port": port, **http}}), text=LetterText())

    def __enter__(self) -> RouterServerRunning:
        self.server.start()
        assert self.server.url is not None
        self.url = self.server.url
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()


# --- before a real cluster -------------------------------------------------------------------------------


def test_shows_workers_and_follows_what_they_do(browser: Browser) -> None:
    with GatedCluster() as cluster:
        browser.open(f"{url_of(cluster)}/ui")
        browser.wait(lambda: len(browser.all("#worker-table tbody tr")) == 2, "both workers")
        names = [cell.text for cell in browser.all("#worker-table .who > span:first-child")]
        assert names == list(cluster.workers), "prefill first, as in the configuration"
        decode = "#worker-table tbody tr:nth-child(2)"
        assert browser.text(f"{decode} .state") == "ready"
        assert "of 64" in browser.text(f"{decode} td:nth-child(3)")
        assert browser.text("#health") == "healthy"
        assert browser.find("#no-requests").is_displayed() and not browser.find("#request-table").is_displayed()
        assert browser.text("#pools li").endswith("1 of 1 ready")

        with cluster.client() as client:
            stream = client.stream(list(range(40)), max_tokens=8)
            with stream:
                wait_until(lambda: cluster.num_waiting == 1, "the request decodes")
                browser.wait_text(f"{decode} [data-label=Running]", "1")
                used = f"return parseFloat(document.querySelector('{decode} .used').style.width)"
                browser.wait(lambda: browser.script(used) > 0, "blocks in use")
                meter = browser.find(f"{decode} .meter")
                assert int(meter.get_attribute("aria-valuenow") or 0) > 0
                browser.wait_text("#tiles", "Open requests1")
                cluster.gate.set()
                result = stream.result()
        browser.wait_text("#request-table .open", result.request_id[:8])
        assert browser.text("#request-table .state") == "length"
        assert "40 → 8" in browser.text("#request-table tbody")
        browser.wait(lambda: browser.script(used) == 0, "all blocks are free again")
        browser.wait(lambda: "p50 –" not in browser.find(".charts svg[role=img]").get_attribute("aria-label"), "TTFT")
        shown = the_overview(cluster)
    assert_same_shape(shown, overview([worker("prefill-0", "prefill")], [recent()]))


def assert_same_shape(real: Any, fake: Any) -> None:
    """What other tests put in place of a router says the same things as one."""
    if isinstance(real, dict):
        assert set(real) == set(fake)
        for key in real:
            assert_same_shape(real[key], fake[key])
    elif isinstance(real, list):
        assert_same_shape(real[0], fake[0])


def test_bars_show_the_stages_in_order_and_to_scale(browser: Browser) -> None:
    times: Callable[[str, StepPlan], float] = lambda worker_id, plan: 0.06 if worker_id == "prefill-0" else 0.01
    with StubCluster(SPLIT, step_s=times) as cluster:
        with cluster.client() as client:
            for num_tokens in (4, 12):
                client.generate(list(range(30)), max_tokens=num_tokens)
        browser.open(f"{url_of(cluster)}/ui")
        browser.wait(lambda: len(browser.all("#request-table .bar")) == 2, "both requests")
        requests = the_overview(cluster)["recent"]
        totals = [sum(stage["ms"] for stage in request["stages"]) for request in requests]
        for scale in ("shared", "each"):
            browser.find(f"input[value={scale}]").click()
            bars = browser.script(
                "return [...document.querySelectorAll('#request-table .bar')].map(bar => [bar.clientWidth,"
                " [...bar.children].map(part => [part.dataset.name, part.getBoundingClientRect().width])])"
            )
            widths = [sum(width for _, width in parts) for _, parts in bars]
            for request, total, (room, parts), width in zip(requests, totals, bars, widths, strict=True):
                stages = request["stages"]
                assert [name for name, _ in parts] == [stage["name"] for stage in stages], "in the order of time"
                assert {"router_queue", "prefill", "handoff_wait", "wire", "decode_steps"} <= {n for n, _ in parts}
                for stage, (_, drawn) in zip(stages, parts, strict=True):
                    assert drawn == pytest.approx(width * stage["ms"] / total, abs=1.5), stage
                if scale == "each":
                    assert width == pytest.approx(room, abs=1.5)
            if scale == "shared":
                assert widths[0] / widths[1] == pytest.approx(totals[0] / totals[1], rel=0.02)

        browser.find("#request-table .open").click()
        details = browser.find("#request-table .details")
        assert details.is_displayed() and requests[0]["request_id"] in details.text
        assert browser.find("#request-table .open").get_attribute("aria-expanded") == "true"
        assert len(browser.all("#request-table .details .stages li")) == len(requests[0]["stages"])


def test_an_answer_streams(browser: Browser) -> None:
    with GatedCluster() as cluster:
        browser.open(f"{url_of(cluster)}/ui")
        settings(browser, max_tokens=9, seed=5)
        send(browser, QUESTION)
        prompt = LetterText().encode(f"user:{QUESTION}\n")
        whole = "".join(map(chr, expected_tokens(prompt, 9, seed=5)))
        said = ".turn.assistant .said"
        browser.wait(lambda: browser.text(said) == whole[:1], "the first token, from the prefill worker")
        assert browser.find("#stop").is_displayed() and not browser.find("#send").is_displayed()
        assert browser.find(".turn.assistant").get_attribute("aria-busy") == "true"
        cluster.let_through(3)
        browser.wait(lambda: browser.text(said) == whole[:4], "three tokens more")
        cluster.gate.set()
        browser.wait(lambda: browser.find("#send").is_displayed(), "the end")
        assert browser.text(said) == whole
        figures = browser.text(".turn.assistant .figures")
        assert "TTFT" in figures and "tokens/s" in figures
        assert f"{len(prompt)} tokens in, 9 out" in figures and "finish: length" in figures
        # Its own waterfall, of the request that the router knows by the same id.
        browser.wait(lambda: browser.all(".turn.assistant .bar"), "its waterfall")
        request = the_overview(cluster)["recent"][0]
        assert request["request_id"] in figures
        parts = browser.script(
            "return [...document.querySelectorAll('.turn .bar span')].map(part => part.dataset.name)"
        )
        assert parts == [stage["name"] for stage in request["stages"]]
        announced = browser.text("#announcer")
        assert announced.endswith("Answer complete, 9 tokens. ")
        cluster.wait_ledger_zero()


def test_stop_frees_everything(browser: Browser) -> None:
    with GatedCluster() as cluster:
        browser.open(f"{url_of(cluster)}/ui")
        settings(browser, max_tokens=200)
        for stop in (lambda: browser.find("#stop").click(), lambda: press(browser, Keys.ESCAPE)):
            browser.find("#clear").click()
            send(browser, QUESTION)
            browser.wait(lambda: browser.text(".turn.assistant .said"), "the first token")
            assert cluster.num_held_blocks() > 0
            stop()
            browser.wait_text(".turn.assistant", "stopped")
            wait_until(lambda: the_overview(cluster)["requests"]["open"] == 0, "the router has nothing open")
            cluster.let_through(1)  # the step that was under way
            cluster.wait_ledger_zero()
            assert browser.focused() == "message"
        assert the_overview(cluster)["recent"][0]["finish_reason"] == "abort"


def test_asks_for_the_key(browser: Browser) -> None:
    browser.expected.append("401")
    with StubCluster(SPLIT, http={"api_keys": [KEY]}) as cluster:
        browser.open(f"{url_of(cluster)}/ui")
        browser.wait(lambda: browser.find("#key-form").is_displayed(), "the form for the key")
        assert "asks for an API key" in browser.text("#key-error")
        browser.wait(lambda: browser.focused() == "key", "the field has the focus")
        browser.find("#key").send_keys("a-wrong-key-of-enough-letters", Keys.ENTER)
        browser.wait(lambda: browser.find("#key-form").is_displayed(), "it is refused")
        assert browser.text("#key-error") not in ("", "This router asks for an API key.")
        assert not browser.all("#worker-table tbody tr")
        browser.find("#key").clear()
        browser.find("#key").send_keys(KEY, Keys.ENTER)
        browser.wait(lambda: len(browser.all("#worker-table tbody tr")) == 2, "the workers")
        assert not browser.find("#key-form").is_displayed() and browser.focused() == "key-button"
        browser.driver.refresh()
        browser.wait(lambda: len(browser.all("#worker-table tbody tr")) == 2, "the tab remembers it")
        settings(browser, max_tokens=3)
        send(browser, QUESTION)
        browser.wait_text(".turn.assistant .figures", "3 out")
        assert KEY not in browser.script("return document.documentElement.outerHTML")


def press(browser: Browser, *keys: str, holding: str | None = None) -> None:
    chain = ActionChains(browser.driver)
    if holding is None:
        chain.send_keys(*keys).perform()
    else:
        chain.key_down(holding).send_keys(*keys).key_up(holding).perform()


def test_keyboard_alone_is_enough(browser: Browser) -> None:
    with GatedCluster() as cluster:
        browser.open(f"{url_of(cluster)}/ui")
        browser.wait(lambda: browser.all("#worker-table tbody tr"), "the workers")
        press(browser, Keys.TAB)
        assert browser.focused() == "A" and browser.find(".skip a").location["y"] >= 0, "the way past it all is seen"
        passed = []
        for _ in range(40):
            press(browser, Keys.TAB)
            passed.append(browser.focused())
            outline = browser.script("return getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", f"no focus to be seen on {passed[-1]}"
            if passed[-1] == "message":
                break
        shown = [name for name in passed if name in ("pause", "key-button", "clear", "transcript", "message")]
        assert shown == ["pause", "key-button", "clear", "transcript", "message"], passed
        press(browser, QUESTION, Keys.ENTER)
        browser.wait(lambda: browser.text(".turn.assistant .said"), "the first token")
        assert browser.focused() == "message"
        press(browser, Keys.ESCAPE)
        browser.wait_text(".turn.assistant", "stopped")
        cluster.gate.set()
        press(browser, Keys.TAB, Keys.TAB, holding=Keys.SHIFT)
        press(browser, Keys.ENTER)  # a new conversation
        assert not browser.all(".turn") and browser.focused() == "message"
        press(browser, "line one")
        press(browser, Keys.ENTER, holding=Keys.SHIFT)
        assert browser.script("return document.getElementById('message').value") == "line one\n", "it is not sent yet"
        press(browser, Keys.TAB, Keys.ENTER)  # the settings
        assert browser.find("#max-tokens").is_displayed()
        for _ in range(4):
            press(browser, Keys.TAB)
        assert browser.focused() == "seed"
        press(browser, Keys.TAB, holding=Keys.SHIFT)
        press(browser, "a", holding=Keys.CONTROL)
        press(browser, "2", Keys.TAB, Keys.TAB, Keys.ENTER)  # max tokens, then the button
        browser.wait_text(".turn.assistant .figures", "2 out")
        # Where its time went: from the button of its row, reached backwards from the playground's first control.
        browser.wait(lambda: browser.all("#request-table .open"), "the row")
        browser.script("document.getElementById('clear').focus()")
        press(browser, Keys.TAB, holding=Keys.SHIFT)
        assert "open" in browser.focused()
        press(browser, Keys.ENTER)
        browser.wait(lambda: any(row.is_displayed() for row in browser.all("#request-table .details")), "its details")
        polls = browser.text("#request-table tbody .muted")
        browser.wait(lambda: browser.text("#request-table tbody .muted") != polls, "another poll")
        assert "open" in browser.focused(), "polls leave the focus where it is"


def test_says_that_the_router_is_gone_and_comes_back(browser: Browser) -> None:
    with RouterServerRunning() as first:
        browser.open(f"{first.url}/ui")
        browser.wait_text("#health", "down")
        assert "no worker ready" in browser.text("#pools")
        assert not browser.find("#trouble").is_displayed()
        port = int(first.url.rpartition(":")[2])
    browser.wait_text("#trouble-text", "not reachable")
    assert browser.find("#trouble").is_displayed() and browser.text("#health") == "not reachable"
    assert browser.find("#trouble").get_attribute("role") == "alert"
    with RouterServerRunning(port) as second:
        browser.wait(lambda: not browser.find("#trouble").is_displayed(), "it is back")
        browser.wait_text("#health", "down")
        assert second.server.incarnation in (browser.find("#health").get_attribute("title") or "")


# --- before a fake router ----------------------------------------------------------------------------------

MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


def test_nothing_that_is_told_becomes_markup(browser: Browser) -> None:
    workers = [worker(MARKUP, MARKUP, node=MARKUP, state=MARKUP, breaker=MARKUP)]
    stages = [{"name": MARKUP, "ms": 5.0}]
    ended = recent(label=MARKUP, error=MARKUP, finish_reason=MARKUP, decode=MARKUP, prefill=MARKUP, stages=stages)
    pieces = (MARKUP, "\n", MARKUP)
    with FakeRouter(overview(workers, [ended], cluster=MARKUP, model=MARKUP, health=MARKUP), pieces) as router:
        browser.open(f"{router.url}/ui")
        browser.wait_text("#worker-table .who", MARKUP)
        browser.find("#request-table .open").click()
        for part in ("#model", "#health", "#pools", "#request-table .details"):
            assert MARKUP in browser.text(part)
        send(browser, MARKUP)
        browser.wait(lambda: browser.text(".turn.assistant .said") == "".join(pieces), "the answer as it is")
        browser.wait(lambda: browser.all(".turn.assistant .bar"), "all is shown")
        router.refusal = (400, {"error": {"message": MARKUP}})
        send(browser, "again")
        browser.wait_text(".turn .error", MARKUP)
        assert not browser.all("body img, main script")
        assert browser.script("return window.hacked === undefined")
        # Not by accident: the page's policy refuses it, whatever a later version of the script does.
        with pytest.raises(Exception, match="TrustedHTML"):
            browser.script("document.body.innerHTML = arguments[0]", MARKUP)
    browser.expected += ["400", "TrustedHTML", "innerHTML"]


def test_a_conversation_and_its_errors(browser: Browser) -> None:
    browser.expected.append("429")
    with FakeRouter(overview([worker("decode-0", "decode")], []), ("It is ", "a stick.")) as router:
        browser.open(f"{router.url}/ui")
        settings(browser, system="Be brief.", temperature="0.5", max_tokens=20)
        send(browser, QUESTION)
        browser.wait_text(".turn.assistant .figures", "9 out")
        router.refusal = (429, {"error": {"message": "the queue is full", "code": "overloaded"}})
        send(browser, "and then")
        browser.wait_text(".turn .error", "the queue is full")
        assert browser.find("#message").get_attribute("value") == "and then", "to be sent again"
        press(browser, Keys.ENTER)
        browser.wait(lambda: len(browser.all(".turn.assistant .figures")) == 2, "the second answer")
        first, refused, second = router.bodies
        assert first["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": QUESTION},
        ]
        assert (first["model"], first["temperature"], first["max_completion_tokens"]) == ("a-model", 0.5, 20)
        assert first["stream"] is True and "seed" not in first
        assert refused == second, "what was refused is no part of the conversation"
        assert second["messages"][2:] == [
            {"role": "assistant", "content": "It is a stick."},
            {"role": "user", "content": "and then"},
        ]
        browser.find("#clear").click()
        assert not browser.all(".turn")
        send(browser, "hello")
        browser.wait_text(".turn.assistant .said", "It is a stick.")
        assert len(router.bodies[-1]["messages"]) == 2
        # A value that no form could send is not sent.
        settings(browser, temperature="7")
        browser.find("#ask summary").click()
        send(browser, "hello")
        assert len(router.bodies) == 4 and browser.find("#temperature").is_displayed()


def crowd() -> dict[str, Any]:
    """64 workers, some of them in trouble, with names as long as they may be."""
    workers = [
        worker(f"{pool}-{i}" if i % 7 else f"{pool}-{i}-" + "x" * 110, pool, node="n" * 90 if i % 5 else "")
        for pool in ("prefill", "decode")
        for i in range(32)
    ]
    workers[3].update(state="lost", seen_s_ago=4321.0)
    workers[40].update(state="draining")
    workers[50].update(breaker="open", stranded_blocks=3)
    names = {"prefill": workers[0]["worker_id"], "decode": workers[63]["worker_id"]}
    requests = [recent(request_id=f"{i:032x}", label="l" * 200, attempts=1 + i % 2, **names) for i in range(50)]
    requests[1].update(finish_reason="error", error="worker lost: " + "e" * 300, total_ms=None, started_s_ago=None)
    requests[2].update(prefill=None, decode=None, stages=[], completion_tokens=123456789)
    return overview(workers, requests, cluster="c" * 63, model="some-organisation/" + "m" * 100)


OVERFLOWING = """
    const scrolls = (e) => e && (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
    return [...document.querySelectorAll('body *')].filter((e) => {
        const box = e.getBoundingClientRect();
        return box.width && box.right > innerWidth + 1 && !scrolls(e.parentElement);
    }).map((e) => e.outerHTML.slice(0, 120));
"""


def test_a_crowd_fits_any_window(browser: Browser) -> None:
    with FakeRouter(crowd(), ("w" * 500, "\n", "words " * 30)) as router:
        browser.open(f"{router.url}/ui")
        browser.wait(lambda: len(browser.all("#worker-table tbody tr")) == 64, "all workers")
        browser.find("#request-table .open").click()
        browser.all("#request-table .open")[1].click()
        browser.script("document.getElementById('message').value = 'q'.repeat(300)")
        browser.find("#send").click()
        browser.wait_text(".turn.assistant .figures", "9 out")
        for width in (1280, 800, 360):
            browser.resize(width)
            fits = f"return document.documentElement.scrollWidth <= {width}"
            browser.wait(lambda fits=fits: browser.script(fits), f"no scrolling of a page {width} wide")
            assert browser.script(OVERFLOWING) == [], width
        for table in ("#worker-table", "#request-table"):
            room = "const s = document.querySelector(arguments[0]).parentElement; return [s.scrollWidth, s.clientWidth]"
            needed, there = browser.script(room, table)
            assert needed <= there, "cards need no scrolling sideways"
            assert browser.find(table).aria_role == "table", "cards are still a table"
        of_workers = "return [...document.querySelectorAll('#worker-table .state')].map(state => state.textContent)"
        states = browser.script(of_workers)
        assert states[0] == "lost" and states[32] == "draining", "what needs attention comes first in its pool"
        assert "breaker open" in browser.text("#worker-table") and "3 stranded" in browser.text("#worker-table")
        assert browser.text("#health") == "degraded" and "1 lost" in browser.text("#pools")


CONTRASTS = """
    const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
        .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (e) => {
        const [r, g, b, alpha = 1] = numbers(getComputedStyle(e).backgroundColor);
        return alpha === 0 && e.parentElement ? ground(e.parentElement) : [r, g, b];
    };
    const poor = [];
    for (const e of document.querySelectorAll('body *')) {
        const own = [...e.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.data.trim());
        const style = getComputedStyle(e);
        const hatched = e.closest('[data-stage$=queue], [data-stage$=wait]');
        if (!own || !e.getClientRects().length || hatched) continue;
        const color = numbers(e instanceof SVGElement ? style.fill : style.color);
        const [a, b] = [light(color), light(ground(e))].sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < 4.5) poor.push([e.outerHTML.slice(0, 100), (a + 0.05) / (b + 0.05)]);
    }
    return poor;
"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_ground(browser: Browser, dark: bool) -> None:
    browser.expected.append("429")
    stages = [
        {"name": name, "ms": 100.0} for name in ("placement", "prefill", "wire", "first_decode_step", "decode_steps")
    ]
    shown = crowd()
    shown["recent"][3].update(stages=stages)
    with FakeRouter(shown) as router:
        browser.open(f"{router.url}/ui", dark=dark)
        browser.wait(lambda: len(browser.all("#worker-table tbody tr")) == 64, "all workers")
        browser.find("input[value=each]").click()
        browser.all("#request-table .open")[1].click()
        send(browser, QUESTION)
        browser.wait_text(".turn.assistant .figures", "9 out")
        router.refusal = (429, {"error": {"message": "the queue is full"}})
        send(browser, QUESTION)
        browser.wait_text(".turn .error", "the queue is full")
        ground = browser.script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 150) == dark
        assert browser.script(CONTRASTS) == []


def test_charts_follow_and_can_be_read_back_in_time(browser: Browser) -> None:
    shown = overview([worker("decode-0", "decode")], [])
    with FakeRouter(shown) as router:
        browser.open(f"{router.url}/ui")
        browser.wait_text(".charts figure", "4,000")
        shown["latency"]["ttft_ms"] = {"count": 20, "p50": 77.0, "p90": 88.0, "p99": 99.0}
        browser.wait_text(".charts figure", "99.0")
        charts = browser.all(".charts figure")
        assert [chart.find_element("tag name", "figcaption").text for chart in charts] == [
            "TTFT, ms",
            "TBT, ms",
            "Output, tokens/s",
        ]
        assert [len(chart.find_elements("css selector", "svg path")) for chart in charts] == [3, 3, 1]
        svg = browser.find(".charts svg[role=img]")
        assert "p50 77.0, p90 88.0, p99 99.0" in (svg.get_attribute("aria-label") or "")
        browser.find("#pause").click()
        assert browser.find("#pause").get_attribute("aria-pressed") == "true"
        browser.script("document.querySelector('.charts svg[role=img]').focus()")
        press(browser, *[Keys.ARROW_LEFT] * 60)
        browser.wait_text(".charts figure", "4,000")
        assert "ago" in browser.text(".charts .keys")


def test_does_not_poll_while_nobody_looks(browser: Browser) -> None:
    with FakeRouter(overview([worker("decode-0", "decode")], [])) as router:
        browser.open(f"{router.url}/ui")
        wait_until(lambda: router.num_polls >= 2, "it polls")
        hide = (
            "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        browser.script(hide, True)
        # A poll may be under way. After it, a time in which another one would be due.
        polls = browser.driver.execute_async_script(
            "const done = arguments[0]; setTimeout(() => {"
            "  const before = performance.getEntriesByType('resource').length;"
            "  setTimeout(() => done([before, performance.getEntriesByType('resource').length]), 1600);"
            "}, 500)"
        )
        assert polls[0] == polls[1]
        seen = router.num_polls
        browser.script(hide, False)
        wait_until(lambda: router.num_polls >= seen + 2, "it polls again")

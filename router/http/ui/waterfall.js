// Where a request's time went: one bar of stages, in the order in which they happened.

const STAGES = [
  ["router_queue", "router queue", "waiting at the router for a place"],
  ["placement", "placement", "the way to the prefill worker"],
  ["prefill_queue", "prefill queue", "waiting for a prefill step"],
  ["prefill", "prefill", "computing the prompt, up to the first token"],
  ["handoff_wait", "hand-off wait", "until all KV blocks were given to the transport"],
  ["wire", "wire", "KV blocks on their way, verified and adopted"],
  ["decode_queue", "decode queue", "waiting for a decode step"],
  ["first_decode_step", "first decode step", "the second token"],
  ["decode_steps", "decode", "all further tokens"],
];
const STAGE_WORDS = new Map(STAGES.map(([name, words]) => [name, words]));

const stageWords = (name) => STAGE_WORDS.get(name) ?? name.replaceAll("_", " ");
const stageKind = (name) => (STAGE_WORDS.has(name) ? name : "");
const stageSum = (stages) => stages.reduce((sum, { ms }) => sum + Math.max(ms, 0), 0);

/** `scaleMs`: what the full width stands for. */
function waterfallBar(stages, scaleMs) {
  const total = stageSum(stages);
  const words = stages.map(({ name, ms }) => `${stageWords(name)} ${duration(ms)}`).join(", ");
  const bar = element("div", { class: "bar", role: "img", "aria-label": words || "no stages" });
  for (const { name, ms } of stages) {
    const part = element("span", {
      "data-stage": stageKind(name),
      "data-name": name,
      title: `${stageWords(name)}: ${duration(ms)}, ${share(total ? ms / total : 0)}`,
    });
    part.append(element("b", { text: stageWords(name) }));
    bar.append(part);
  }
  scaleBar(bar, stages, scaleMs);
  return bar;
}

/** Widths only, through the object model: the page's policy allows no style attributes. */
function scaleBar(bar, stages, scaleMs) {
  stages.forEach(({ ms }, i) => {
    bar.children[i].style.width = `${scaleMs > 0 ? (100 * Math.max(ms, 0)) / scaleMs : 0}%`;
  });
}

/** The same in figures. */
function stageList(stages) {
  const total = stageSum(stages);
  return element(
    "ul",
    { class: "stages", "aria-label": "Stages" },
    ...stages.map(({ name, ms }) =>
      element(
        "li",
        {},
        element("span", { class: "what" }, element("span", { class: "swatch", "data-stage": stageKind(name) }), stageWords(name)),
        element("span", { class: "number", text: duration(ms) }),
        element("span", { class: "number muted", text: share(total ? ms / total : 0) }),
      ),
    ),
  );
}

function startLegend() {
  byId("stage-legend").append(
    ...STAGES.map(([name, words, meaning]) =>
      element("li", { title: meaning }, element("span", { class: "swatch", "data-stage": name }), words),
    ),
  );
}

// --- the table of recent requests -------------------------------------------------------------------------------

const FINE = new Set(["stop", "length", "tool_calls", "abort"]);

class RequestTable {
  constructor() {
    startLegend();
    this.table = byId("request-table");
    this.ticks = element("div", { class: "ticks", "aria-hidden": "true" });
    this.head = element(
      "thead",
      { role: "rowgroup" },
      row(
        {},
        heading("Request"),
        heading("Result"),
        heading("Tokens"),
        heading("Workers"),
        heading("Total", { class: "number" }),
        heading("", { class: "timeline" }),
      ),
    );
    this.head.querySelector(".timeline").append(element("span", { class: "unseen", text: "Where the time went" }), this.ticks);
    this.table.append(this.head);
    this.opened = new Set();
    this.requests = [];
    for (const input of document.getElementsByName("scale")) input.addEventListener("change", () => this.draw());
    this.show([]);
  }

  show(requests) {
    this.requests = requests;
    const ids = new Set(requests.map((request) => request.request_id));
    for (const id of this.opened) if (!ids.has(id)) this.opened.delete(id);
    this.draw();
  }

  draw() {
    const shared = document.querySelector('input[name="scale"]:checked').value === "shared";
    const longest = Math.max(0, ...this.requests.map(({ stages }) => stageSum(stages)));
    const step = longest > 0 ? roundUp(longest / 4) : 0;
    const scaleMs = step * Math.ceil(longest / (step || 1));
    this.table.hidden = this.requests.length === 0;
    byId("no-requests").hidden = this.requests.length > 0;
    this.drawTicks(shared ? scaleMs : 0, step);
    reconcile(this.table, this.requests, {
      keyOf: (request) => request.request_id,
      make: (request) => this.makeBody(request),
      update: (body, request) => {
        body.update(request);
        scaleBar(body.querySelector(".bar"), request.stages, shared ? scaleMs : stageSum(request.stages));
      },
      after: this.head,
    });
  }

  drawTicks(scaleMs, step) {
    const marks = [];
    for (let at = 0; scaleMs > 0 && at <= scaleMs * 1.001; at += step) {
      const tick = element("span", { text: at === 0 ? "0" : Number.isInteger(step) || step >= 1000 ? shortDuration(at) : duration(at) });
      tick.style.left = `${(100 * at) / scaleMs}%`;
      marks.push(tick);
    }
    this.ticks.replaceChildren(...(marks.length ? marks : [element("span", { text: "share of each request" })]));
  }

  makeBody(request) {
    const id = request.request_id;
    const detailsId = `details-${id.replace(/[^A-Za-z0-9_-]/g, "-")}`;
    const button = element(
      "button",
      { type: "button", class: "open id", "aria-expanded": "false", "aria-controls": detailsId, title: id },
      id.slice(0, 8),
    );
    const ago = element("span", { class: "muted" });
    const result = request.finish_reason || (request.error ? "error" : "unknown");
    const state = FINE.has(result) && !request.error ? (result === "abort" ? "warn" : "good") : "bad";
    const { prefill, decode } = request;
    const path = prefill && decode && prefill !== decode ? [prefill, `→ ${decode}`] : [decode ?? prefill ?? "–"];
    const details = row({ class: "details", id: detailsId, hidden: true }, cell({ colspan: "6" }));
    const body = element(
      "tbody",
      { role: "rowgroup" },
      row(
        {},
        cell({ class: "wide" }, button, ago),
        cell(
          { class: "quiet" },
          element("span", { class: "state", "data-state": state, text: result }),
          request.attempts > 1 ? element("span", { class: "muted", text: plural(request.attempts, "attempt") }) : null,
        ),
        cell(
          { "data-label": "Tokens", class: "quiet" },
          `${count(request.prompt_tokens)} → ${count(request.completion_tokens)}`,
          request.cached_tokens ? element("span", { class: "muted", text: `${count(request.cached_tokens)} cached` }) : null,
        ),
        cell({ "data-label": "Workers", class: "route" }, ...path.map((name) => element("div", { text: name, title: name }))),
        cell({ "data-label": "Total", class: "number", text: duration(request.total_ms) }),
        cell({ class: "timeline whole" }, waterfallBar(request.stages, 0)),
      ),
      details,
    );
    button.addEventListener("click", () => {
      const open = details.hidden;
      if (open) this.opened.add(id);
      else this.opened.delete(id);
      details.hidden = !open;
      button.setAttribute("aria-expanded", String(open));
      if (open) details.firstChild.replaceChildren(requestDetails(request));
    });
    body.update = ({ started_s_ago }) => setText(ago, isNumber(started_s_ago) ? `${span(started_s_ago)} ago` : "");
    return body;
  }
}

function shortDuration(ms) {
  if (ms < 1000) return `${ms} ms`;
  return ms < 60000 ? `${Number((ms / 1000).toPrecision(4))} s` : `${Number((ms / 60000).toPrecision(3))} min`;
}

/** What a row has no room for. */
function requestDetails(request) {
  const facts = [
    ["request", request.request_id],
    ["label", request.label],
    ["error", request.error],
    ["prefill", request.prefill],
    ["decode", request.decode],
    ["attempts", request.attempts > 1 ? String(request.attempts) : ""],
  ];
  const list = element("dl", { class: "facts" });
  for (const [name, value] of facts) {
    if (value) list.append(element("dt", { text: name }), element("dd", { text: value, class: name === "error" ? "error" : null }));
  }
  return element("div", { class: "split" }, list, stageList(request.stages));
}

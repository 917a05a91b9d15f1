// The cluster as of the last poll: health, figures, charts, pools, workers.

const HEALTH = { ok: ["good", "healthy"], degraded: ["warn", "degraded"], down: ["bad", "down"] };
const POOL_STATE = { ok: ["good", "ok"], degraded: ["warn", "degraded"], empty: ["bad", "no worker ready"] };
const WORKER_STATE = { ready: "good", draining: "warn", lost: "bad" };
const PERCENTILES = [
  { key: "p50", label: "p50", look: "low" },
  { key: "p90", label: "p90", look: "middle" },
  { key: "p99", label: "p99", look: "high" },
];

class Overview {
  constructor() {
    this.tiles = new Map();
    for (const [key, label] of [
      ["open", "Open requests"],
      ["requests", "Requests/s"],
      ["tokens", "Tokens/s"],
      ["ttft", "TTFT p50"],
      ["tbt", "TBT p50"],
      ["e2e", "Request p50"],
      ["kv", "KV in use"],
    ]) {
      const tile = { value: element("dd", { text: "–" }), note: element("dd") };
      this.tiles.set(key, tile);
      byId("tiles").append(element("div", {}, element("dt", { text: label }), tile.value, tile.note));
    }
    const charts = byId("charts");
    this.ttft = new Chart(charts, { title: "TTFT", unit: "ms", lines: PERCENTILES });
    this.tbt = new Chart(charts, { title: "TBT", unit: "ms", lines: PERCENTILES });
    const output = [{ key: "tokens", label: "all requests", look: "low" }];
    this.tokens = new Chart(charts, { title: "Output", unit: "tokens/s", lines: output });
    this.table = byId("worker-table");
    this.head = element(
      "thead",
      { role: "rowgroup" },
      row(
        {},
        heading("Worker"),
        heading("State"),
        heading("KV blocks"),
        heading("Running", { class: "number" }),
        heading("Waiting", { class: "number" }),
        heading("Cache hits", { class: "number", title: "Share of the context tokens whose KV was in the worker's prefix cache" }),
        heading("KV moved", { class: "number", title: "Bytes of KV sent to and received from other workers" }),
        heading("Heard of", { class: "number", title: "Since the router's last word from it" }),
      ),
    );
    this.table.append(this.head);
    this.requests = new RequestTable();
  }

  /** `at`: seconds on the page's clock. */
  show(overview, at) {
    document.title = `${overview.cluster} – Baton`;
    setText(byId("cluster"), overview.cluster);
    setText(byId("model"), overview.model);
    setAttribute(byId("model"), "title", overview.model);
    const [state, word] = overview.stopping ? ["warn", "stopping"] : (HEALTH[overview.health] ?? ["none", overview.health]);
    setAttribute(byId("health"), "data-state", state);
    setText(byId("health"), word);
    setAttribute(byId("health"), "title", `router ${overview.router_incarnation}, up ${span(overview.uptime_s)}`);
    this.showFigures(overview);
    this.showCharts(overview.latency, at);
    this.showPools(overview.pools);
    this.showWorkers(overview.pools, overview.workers);
    this.requests.show(overview.recent);
  }

  showFigures({ requests, latency, workers }) {
    const set = (key, value, note) => {
      setText(this.tiles.get(key).value, value);
      setText(this.tiles.get(key).note, note);
    };
    const percentiles = ({ count: samples, p50, p99 }) =>
      samples ? [duration(p50), `p99 ${duration(p99)}`] : ["–", "none yet"];
    const present = workers.filter((worker) => worker.state !== "lost");
    const total = present.reduce((sum, worker) => sum + worker.blocks_total, 0);
    const used = present.reduce((sum, worker) => sum + worker.blocks_total - worker.blocks_free, 0);
    set("open", count(requests.open), `${count(requests.queued)} queued`);
    set("requests", rate(latency.requests_per_s), `${count(latency.e2e_ms.count)} ended`);
    set("tokens", rate(latency.tokens_per_s), "delivered");
    set("ttft", ...percentiles(latency.ttft_ms));
    set("tbt", ...percentiles(latency.tbt_ms));
    set("e2e", ...percentiles(latency.e2e_ms));
    set("kv", total ? share(used / total) : "–", `of ${plural(total, "block")}`);
  }

  showCharts({ ttft_ms: ttft, tbt_ms: tbt, tokens_per_s: tokens }, at) {
    this.ttft.add(at, ttft.count ? ttft : {});
    this.tbt.add(at, tbt.count ? tbt : {});
    this.tokens.add(at, { tokens });
  }

  showPools(pools) {
    reconcile(byId("pools"), pools, {
      keyOf: (pool) => pool.name,
      make: (pool) =>
        element(
          "li",
          {},
          element("b", { text: pool.name }),
          element("span", { class: "muted", text: pool.role === pool.name ? null : `role ${pool.role}` }),
          element("span", { class: "state" }),
          element("span"),
        ),
      update: (item, pool) => {
        const [state, word] = POOL_STATE[pool.state] ?? ["none", pool.state];
        setAttribute(item.children[2], "data-state", state);
        setText(item.children[2], word);
        const parts = [`${count(pool.ready)} of ${count(pool.workers)} ready`];
        if (pool.draining) parts.push(`${count(pool.draining)} draining`);
        if (pool.lost) parts.push(`${count(pool.lost)} lost`);
        setText(item.children[3], parts.join(", "));
      },
    });
  }

  /** By pool in the configuration's order; within it what needs attention first. */
  showWorkers(pools, workers) {
    const poolRank = new Map(pools.map((pool, i) => [pool.name, i]));
    const stateRank = { lost: 0, draining: 1 };
    const sorted = [...workers].sort(
      (a, b) =>
        (poolRank.get(a.pool) ?? 99) - (poolRank.get(b.pool) ?? 99) ||
        (stateRank[a.state] ?? 2) - (stateRank[b.state] ?? 2) ||
        a.worker_id.localeCompare(b.worker_id, "en", { numeric: true }),
    );
    this.body ??= this.table.appendChild(element("tbody", { role: "rowgroup" }));
    reconcile(this.body, sorted, {
      keyOf: (worker) => worker.worker_id,
      make: (worker) => this.makeWorker(worker),
      update: (line, worker) => line.update(worker),
    });
  }

  makeWorker(first) {
    const parts = {
      place: element("span", { class: "muted" }),
      state: element("span", { class: "state" }),
      breaker: element("span", { class: "muted" }),
      meter: element("span", { class: "meter", role: "meter", "aria-valuemin": "0", "aria-valuemax": "100" }),
      blocks: element("span", { class: "quiet" }),
      cached: element("span", { class: "muted" }),
      running: cell({ class: "number", "data-label": "Running" }),
      waiting: element("span"),
      pending: element("span", { class: "muted" }),
      hits: cell({ class: "number", "data-label": "Cache hits" }),
      sent: element("span"),
      received: element("span", { class: "muted" }),
      seen: cell({ class: "number", "data-label": "Heard of" }),
    };
    const [used, cached, stranded] = ["used", "cached", "stranded"].map((look) => element("i", { class: look }));
    parts.meter.append(used, cached, stranded);
    const line = row(
      {},
      element("th", { scope: "row", role: "rowheader", class: "who wide" }, element("span", { text: first.worker_id }), parts.place),
      cell({}, parts.state, parts.breaker),
      cell({ "data-label": "KV blocks", class: "whole" }, parts.meter, parts.blocks, parts.cached),
      parts.running,
      cell({ class: "number", "data-label": "Waiting" }, parts.waiting, parts.pending),
      parts.hits,
      cell({ class: "number wide", "data-label": "KV moved" }, parts.sent, parts.received),
      parts.seen,
    );
    line.update = (worker) => {
      const breaker = worker.breaker && worker.breaker !== "closed" ? `breaker ${worker.breaker.replace("_", " ")}` : "";
      const look = WORKER_STATE[worker.state] ?? "none";
      const state = look === "good" && (breaker || worker.stranded_blocks) ? "warn" : look;
      setAttribute(line, "data-state", state);
      setText(parts.place, [worker.role === worker.pool ? "" : worker.role, worker.device, worker.node].filter(Boolean).join(" · "));
      setAttribute(parts.state, "data-state", state);
      setText(parts.state, worker.state);
      setText(parts.breaker, breaker);
      const total = worker.blocks_total;
      const held = total - worker.blocks_free;
      const part = (blocks) => (total ? (100 * blocks) / total : 0);
      const percent = Math.round(part(held));
      used.style.width = `${part(held)}%`;
      cached.style.left = `${part(held)}%`;
      cached.style.width = `${part(worker.blocks_cached)}%`;
      stranded.style.width = `${part(worker.stranded_blocks)}%`;
      setAttribute(parts.meter, "aria-valuenow", String(percent));
      setAttribute(parts.meter, "aria-label", `KV cache of ${worker.worker_id}`);
      setText(parts.blocks, `${percent} % · ${count(held)} of ${count(total)}`);
      const notes = [];
      if (worker.blocks_cached) notes.push(`${count(worker.blocks_cached)} cached`);
      if (worker.stranded_blocks) notes.push(`${count(worker.stranded_blocks)} stranded`);
      setText(parts.cached, notes.join(", "));
      setText(parts.running, count(worker.running));
      setText(parts.waiting, count(worker.waiting));
      setText(parts.pending, worker.pending_tokens ? plural(worker.pending_tokens, "token") : "");
      setText(parts.hits, share(worker.cache_hit_share));
      setText(parts.sent, `${bytes(worker.bytes_sent)} out`);
      setText(parts.received, `${bytes(worker.bytes_received)} in`);
      setText(parts.seen, span(worker.seen_s_ago));
    };
    return line;
  }
}

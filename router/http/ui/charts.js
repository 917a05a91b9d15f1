// Line charts of what was polled, kept as long as the page is open.

const HISTORY_S = 300;
const GAP_S = 4; // no sample for so long: the line is broken
const axisNumber = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });

/** The least "round" number of 1, 2, 5 times a power of ten that is not below `value`. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999999);
}

/** `lines`: [{key, label, look}]; a value that is no number is a gap. */
class Chart {
  constructor(parent, { title, unit, lines }) {
    Object.assign(this, { title, unit, lines });
    this.samples = [];
    this.cursor = null; // seconds before now, while somebody points at a time
    this.readings = lines.map(() => element("b"));
    this.when = element("li", { class: "muted" });
    this.svg = drawing("svg", { role: "img", tabindex: "0" });
    const keys = lines.map(({ label, look }, i) =>
      element("li", {}, this.sample(look), element("span", { text: label }), this.readings[i]),
    );
    parent.append(
      element(
        "figure",
        {},
        element("figcaption", { text: `${title}, ${unit}` }),
        element("ul", { class: "keys" }, ...keys, this.when),
        this.svg,
      ),
    );
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.show(null));
    this.svg.addEventListener("blur", () => this.show(null));
    this.svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: 1, ArrowRight: -1, Home: HISTORY_S, End: -HISTORY_S }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      this.show(Math.min(Math.max((this.cursor ?? 0) + step, 0), this.shownSpan()));
    });
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  sample(look) {
    const line = drawing("line", { x1: 1, x2: 25, y1: 5.5, y2: 5.5, class: look });
    return drawing("svg", { viewBox: "0 0 26 11", "aria-hidden": "true" }, line);
  }

  /** `at`: seconds on the page's clock. */
  add(at, values) {
    this.samples.push({ at, values });
    while (this.samples[0].at < at - HISTORY_S - GAP_S) this.samples.shift();
    this.draw();
  }

  shownSpan() {
    const { length } = this.samples;
    const age = length ? this.samples[length - 1].at - this.samples[0].at : 0;
    return [60, 120, HISTORY_S].find((shown) => shown >= age) ?? HISTORY_S;
  }

  point(x) {
    const { left, width } = this.area();
    this.show(Math.min(Math.max((1 - (x - left) / width) * this.shownSpan(), 0), this.shownSpan()));
  }

  show(cursor) {
    this.cursor = cursor;
    this.draw();
  }

  area() {
    const left = 44;
    return { left, top: 8, width: Math.max(this.svg.clientWidth - left - 8, 10), height: Math.max(this.svg.clientHeight - 30, 10) };
  }

  draw() {
    const latest = this.samples[this.samples.length - 1];
    const now = latest ? latest.at : 0;
    const { left, top, width, height } = this.area();
    const shown = this.shownSpan();
    const visible = this.samples.filter((sample) => sample.at >= now - shown - GAP_S);
    const values = visible.flatMap((sample) => this.lines.map(({ key }) => sample.values[key])).filter(isNumber);
    const highest = Math.max(0, ...values);
    const step = highest > 0 ? roundUp(highest / 4) : 1;
    const limit = step * Math.max(Math.ceil(highest / step), 1);
    const x = (at) => left + width * (1 - (now - at) / shown);
    const y = (value) => top + height * (1 - value / limit);
    const parts = [];
    for (let value = 0; value <= limit * 1.001; value += step) {
      const at = Math.round(y(value)) + 0.5;
      parts.push(drawing("line", { x1: left, x2: left + width, y1: at, y2: at, class: value ? "grid" : "axis" }));
      const text = axisNumber.format(value);
      if (values.length) parts.push(drawing("text", { x: left - 5, y: at + 4, "text-anchor": "end", text }));
    }
    if (!values.length) {
      const place = { x: left + width / 2, y: top + height / 2, "text-anchor": "middle", class: "nothing" };
      parts.push(drawing("text", { ...place, text: "nothing measured" }));
    }
    for (const part of [1, 0.5, 0]) {
      const seconds = part * shown;
      const at = left + width * (1 - part);
      const anchor = part === 1 ? "start" : part ? "middle" : "end";
      const text = seconds === 0 ? "now" : seconds % 60 ? `−${seconds} s` : `−${seconds / 60} min`;
      parts.push(drawing("line", { x1: at, x2: at, y1: top + height, y2: top + height + 4, class: "axis" }));
      parts.push(drawing("text", { x: at, y: top + height + 16, "text-anchor": anchor, text }));
    }
    for (const { key, look } of this.lines) {
      const path = this.path(visible, key, x, y, left);
      if (path) parts.push(drawing("path", { d: path, class: look }));
    }
    const read = this.cursor === null ? latest : this.nearest(now - this.cursor);
    if (this.cursor !== null && read) {
      parts.push(drawing("line", { x1: x(read.at), x2: x(read.at), y1: top, y2: top + height, class: "cursor" }));
    }
    this.svg.replaceChildren(...parts);
    this.lines.forEach(({ key }, i) => setText(this.readings[i], read ? rate(read.values[key]) : "–"));
    setText(this.when, this.cursor !== null && read ? `${span(now - read.at)} ago` : "");
    const summary = this.lines.map(({ label }, i) => `${label} ${this.readings[i].textContent}`).join(", ");
    setAttribute(this.svg, "aria-label", `${this.title} in ${this.unit}: ${summary}. Arrow keys go back in time.`);
  }

  /** A line through what is there; where something is missing it starts anew. A lone point is a dot. */
  path(samples, key, x, y, left) {
    let path = "";
    let previous = null;
    for (const { at, values } of samples) {
      const value = values[key];
      if (!isNumber(value) || x(at) < left - 1) {
        previous = null;
        continue;
      }
      const point = `${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      path += previous !== null && at - previous <= GAP_S ? `L${point}` : `M${point}h.01`;
      previous = at;
    }
    return path;
  }

  nearest(at) {
    let best = null;
    for (const sample of this.samples) if (!best || Math.abs(sample.at - at) <= Math.abs(best.at - at)) best = sample;
    return best;
  }
}

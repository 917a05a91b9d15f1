// Elements and words. Whatever comes from the router or the model becomes text or an attribute, never markup.

const byId = (id) => document.getElementById(id);

/** A new element; `properties` are attributes, except `text` and `on<event>`. Absent children are left out. */
function element(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same in SVG. */
function drawing(tag, properties = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Cells and rows say what they are, since narrow windows lay them out as cards. */
const row = (properties, ...cells) => element("tr", { role: "row", ...properties }, ...cells);
const cell = (properties, ...children) => element("td", { role: "cell", ...properties }, ...children);
const heading = (text, properties = {}) =>
  element("th", { role: "columnheader", scope: "col", text, ...properties });

/** Only what differs is touched: a live region speaks of each change. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/**
 * Makes the children of `parent` behind `after` those of `items`, in order. The node of a known key stays the same
 * one, and in its place where that is possible: it may have the focus.
 */
function reconcile(parent, items, { keyOf, make, update, after = null }) {
  const known = new Map();
  for (let node = after ? after.nextSibling : parent.firstChild; node; node = node.nextSibling) known.set(node.key, node);
  const keys = new Set(items.map(keyOf));
  for (const [key, node] of known) if (!keys.has(key)) node.remove();
  let next = after ? after.nextSibling : parent.firstChild;
  for (const item of items) {
    let node = known.get(keyOf(item));
    if (node === undefined) {
      node = make(item);
      node.key = keyOf(item);
    }
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
    update(node, item);
  }
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

const count = (value) => (isNumber(value) ? grouped.format(value) : "–");

/** A rate: one decimal while it is small. */
const rate = (value) => (!isNumber(value) ? "–" : value < 100 ? value.toFixed(1) : grouped.format(value));

const share = (value) => (isNumber(value) ? `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %` : "–");

function duration(ms) {
  if (!isNumber(ms)) return "–";
  if (ms < 0.95) return `${ms.toFixed(2)} ms`;
  if (ms < 99.5) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${ms.toFixed(0)} ms`;
  if (ms < 59950) return `${(ms / 1000).toFixed(ms < 9995 ? 2 : 1)} s`;
  return span(ms / 1000);
}

/** How long ago, or how long: coarse. */
function span(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 99.5) return `${seconds.toFixed(0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.round(minutes / 60);
  return hours < 72 ? `${hours} h` : `${Math.round(hours / 24)} days`;
}

function bytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
